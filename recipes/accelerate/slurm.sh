#!/bin/bash
# GRPO on a SLURM cluster: the first node serves rollouts with vLLM, the others train. Run steps 2 and 3 before it.
#   sbatch --nodes 3 --gpus-per-node 4 recipes/accelerate/slurm.sh recipes/R.yaml [--grpo.gradient_accumulation_steps 2 ...]
# The server uses one GPU of its node. SERVER_GPUS=2 sbatch ... splits the model over more of them (tensor parallelism: a
# number that divides the model's attention heads, 12 in Qwen2.5-Coder-1.5B); data parallelism is for mixtures of experts only.
# The folder, with data/, checkpoints/ and .venv/, must be on a disk that all nodes see. Not yet run on a cluster.
#SBATCH --job-name=sixstep
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
set -euo pipefail

recipe=$1
shift
source .venv/bin/activate
run=$(sed -n 's/^run: *//p' "$recipe")
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
server=${nodes[0]}
trainers=$((SLURM_NNODES - 1))
gpus=${SLURM_GPUS_ON_NODE:?ask for GPUs: sbatch --gpus-per-node N}

srun --nodes 1 --nodelist "$server" \
  trl vllm-serve --model "checkpoints/$run/sft/merged" --tensor_parallel_size "${SERVER_GPUS:-1}" &
serving=$!
trap 'kill $serving 2>/dev/null || true' EXIT

# --exclude keeps the training off the server's node; SLURM_PROCID numbers the nodes that are left
srun --nodes "$trainers" --exclude "$server" bash -c "exec accelerate launch \
  --config_file recipes/accelerate/ddp.yaml --num_machines $trainers --num_processes $((trainers * gpus)) \
  --machine_rank \$SLURM_PROCID --main_process_ip ${nodes[1]} --main_process_port 29500 \
  step4_grpo.py --config $recipe --grpo.use_vllm true --grpo.vllm_mode server --grpo.vllm_server_host $server $*"
