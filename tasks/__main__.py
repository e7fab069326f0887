"""Tools of the tasks: `python -m tasks own_db --help`, `python -m tasks medical --help`; without a name, the list of tasks."""

import sys

from tasks import TASKS, medical, own_db

COMMANDS = {"own_db": own_db.main, "medical": medical.main}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        command = COMMANDS[sys.argv.pop(1)]
        sys.argv[0] = f"python -m tasks {command.__module__.rpartition('.')[2]}"
        command()
        return
    for task in TASKS.values():
        module = "tasks.mini" if task.name.startswith("mini_") else task.trajectory.__module__
        print(f"{task.name:10} {task.environment:11} {sys.modules[module].__doc__.splitlines()[0]}")
    if len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help"):
        sys.exit(f"error: no tool '{sys.argv[1]}'; there are: {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
