"""Questions on the medical database with reference answers that are filled from query results, in English and Chinese.

A template has questions (variants), one query, and an answer. `{name}`, `{other}`, `{group}` are what is asked about,
`{l}` is en or zh, `{0}`, `{1}` the columns of the result (the values of several rows joined). The facts of a reference
are those values, one by one. A candidate is dropped when its result is empty, NULL, too long to say, or not the only one.
"""

import random
import sqlite3
from dataclasses import dataclass
from string import Formatter

from tasks.medical_facts import SEPARATOR

MOST_ITEMS = 5  # values that an answer may have to list


@dataclass(frozen=True)
class Template:
    about: str  # drug | disease | two drugs | category | department | maker | form
    sql: str
    en: tuple[str, ...]
    zh: tuple[str, ...]
    answer_en: str
    answer_zh: str
    best: bool = False  # "the cheapest": the query orders by its last column, where the first two rows must differ


DRUG = "SELECT {what} FROM drugs_info WHERE name_{{l}} = '{{name}}'"
DISEASE = "SELECT {what} FROM disease WHERE name_{{l}} = '{{name}}'"
BOTH = (
    "SELECT {what} FROM disease JOIN drugs_info ON drug_id = first_line_drug_id WHERE disease.name_{{l}} = '{{name}}'"
)


def drug(what: str, *texts, **options) -> Template:
    return Template("drug", DRUG.format(what=what), *texts, **options)


def disease(what: str, *texts, frame: str = DISEASE, **options) -> Template:
    return Template("disease", frame.format(what=what), *texts, **options)


TEMPLATES = (
    drug(
        "max_daily_mg",
        (
            "What is the maximum daily dose of {name} in mg?",
            "How many milligrams of {name} may be taken a day at most?",
        ),
        ("{name}每天最多可以服用多少毫克？", "{name}的每日最大剂量是多少毫克？"),
        "The maximum daily dose of {name} is {0} mg.",
        "{name}的每日最大剂量为{0}毫克。",
    ),
    drug(
        "side_effects_{l}",
        ("What are the side effects of {name}?", "Which side effects should a patient on {name} expect?"),
        ("{name}有哪些副作用？", "服用{name}可能出现哪些不良反应？"),
        "The side effects of {name} are {0}.",
        "{name}的副作用有{0}。",
    ),
    drug(
        "indication_{l}",
        ("What is {name} used for?", "For which conditions is {name} indicated?"),
        ("{name}用于治疗什么？", "{name}的适应症是什么？"),
        "{name} is used for {0}.",
        "{name}用于治疗{0}。",
    ),
    drug(
        "contraindication_{l}",
        ("What is the contraindication of {name}?", "In which case must {name} not be given?"),
        ("{name}的禁忌症是什么？", "什么情况下不能使用{name}？"),
        "{name} must not be given in case of {0}.",
        "{name}的禁忌症为{0}。",
    ),
    drug(
        "price_yuan",
        ("How much does {name} cost in yuan?", "What is the price of {name}?"),
        ("{name}的价格是多少元？", "一盒{name}多少钱？"),
        "{name} costs {0} yuan.",
        "{name}的价格为{0}元。",
    ),
    drug(
        "category_{l}, manufacturer_{l}",
        (
            "To which class of drugs does {name} belong, and who makes it?",
            "Name the drug class and the maker of {name}.",
        ),
        ("{name}属于哪一类药物，由哪家厂商生产？", "请说明{name}的药物类别和生产厂家。"),
        "{name} belongs to the class {0} and is made by {1}.",
        "{name}属于{0}，由{1}生产。",
    ),
    drug(
        "form_{l}, strength_mg",
        ("In which form and strength is {name} sold?", "What are the dosage form and the strength in mg of {name}?"),
        ("{name}是什么剂型，规格是多少毫克？", "请给出{name}的剂型和规格。"),
        "{name} is sold as {0} of {1} mg.",
        "{name}的剂型为{0}，规格为{1}毫克。",
    ),
    drug(
        "prescription_{l}, shelf_life_months",
        (
            "Is {name} a prescription drug, and for how many months does it keep?",
            "How is {name} dispensed, and what is its shelf life?",
        ),
        ("{name}是处方药还是非处方药，保质期多少个月？", "{name}需要处方吗？能保存几个月？"),
        "{name} is dispensed as follows: {0}; its shelf life is {1} months.",
        "{name}是{0}，保质期为{1}个月。",
    ),
    drug(
        "max_daily_mg / strength_mg",
        (
            "How many units of {name} make up its maximum daily dose?",
            "The maximum daily dose of {name} corresponds to how many single doses?",
        ),
        ("{name}的每日最大剂量相当于几个单位剂量？", "{name}每天最多可用几个单次剂量？"),
        "The maximum daily dose of {name} is {0} single doses.",
        "{name}每天最多{0}个单次剂量。",
    ),
    disease(
        "symptoms_{l}",
        ("What are the symptoms of {name}?", "How does {name} show itself?"),
        ("{name}有哪些症状？", "得了{name}会有什么表现？"),
        "The symptoms of {name} are {0}.",
        "{name}的症状有{0}。",
    ),
    disease(
        "department_{l}",
        ("Which department treats {name}?", "Where should a patient with {name} be seen?"),
        ("{name}应该挂哪个科？", "{name}由哪个科室诊治？"),
        "{name} is treated in the department of {0}.",
        "{name}应到{0}就诊。",
    ),
    disease(
        "cause_{l}, prevention_{l}",
        ("What causes {name} and how can it be prevented?", "Name the cause of {name} and its prevention."),
        ("{name}的病因是什么，如何预防？", "{name}是怎么引起的？怎样预防？"),
        "{name} is caused by {0}; it is prevented by {1}.",
        "{name}的病因是{0}，预防方法是{1}。",
    ),
    disease(
        "incubation_days",
        ("How many days is the incubation period of {name}?", "How long is {name} incubated?"),
        ("{name}的潜伏期是多少天？", "{name}感染后多少天发病？"),
        "The incubation period of {name} is {0} days.",
        "{name}的潜伏期为{0}天。",
    ),
    disease(
        "course_days",
        ("How many days does {name} usually last?", "How long is the course of {name}?"),
        ("{name}的病程一般是多少天？", "{name}通常多少天能好？"),
        "{name} usually lasts {0} days.",
        "{name}的病程一般为{0}天。",
    ),
    disease(
        "drugs_info.name_{l}",
        ("Which drug is the first choice for {name}?", "What is the first-line drug for {name}?"),
        ("治疗{name}首选什么药？", "{name}的一线用药是什么？"),
        "The first-line drug for {name} is {0}.",
        "{name}的首选药物是{0}。",
        frame=BOTH,
    ),
    disease(
        "drugs_info.name_{l}, side_effects_{l}",
        (
            "Which side effects does the first-line drug for {name} have?",
            "Name the first-line drug for {name} and its side effects.",
        ),
        ("{name}的首选药物有哪些副作用？", "请说出{name}的首选药及其副作用。"),
        "The first-line drug for {name} is {0}; its side effects are {1}.",
        "{name}的首选药物是{0}，副作用有{1}。",
        frame=BOTH,
    ),
    disease(
        "drugs_info.name_{l}, price_yuan, max_daily_mg",
        ("What does the first-line drug for {name} cost, and what is its maximum daily dose?",),
        ("{name}的首选药物多少钱，每日最大剂量是多少？",),
        "The first-line drug for {name} is {0}: it costs {1} yuan, and at most {2} mg may be taken a day.",
        "{name}的首选药物是{0}，价格{1}元，每日最大剂量{2}毫克。",
        frame=BOTH,
    ),
    disease(
        "drugs_info.name_{l}, contraindication_{l}",
        ("When must the first-line drug for {name} not be used?",),
        ("{name}的首选药物有什么禁忌？",),
        "The first-line drug for {name} is {0}; it must not be used in case of {1}.",
        "{name}的首选药物是{0}，禁忌症为{1}。",
        frame=BOTH,
    ),
    Template(
        "two drugs",
        "SELECT name_{l}, price_yuan FROM drugs_info WHERE name_{l} IN ('{name}', '{other}') ORDER BY price_yuan LIMIT 1",
        ("Which is cheaper, {name} or {other}, and what does it cost?",),
        ("{name}和{other}哪个更便宜，多少钱？",),
        "{0} is cheaper; it costs {1} yuan.",
        "{0}更便宜，价格为{1}元。",
        best=True,
    ),
    Template(
        "two drugs",
        "SELECT name_{l}, shelf_life_months FROM drugs_info WHERE name_{l} IN ('{name}', '{other}')"
        " ORDER BY shelf_life_months DESC LIMIT 1",
        ("Which keeps longer, {name} or {other}, and for how many months?",),
        ("{name}和{other}哪个保质期更长，是多少个月？",),
        "{0} keeps longer: {1} months.",
        "{0}的保质期更长，为{1}个月。",
        best=True,
    ),
    Template(
        "category",
        "SELECT name_{l}, price_yuan FROM drugs_info WHERE category_{l} = '{group}' ORDER BY price_yuan LIMIT 1",
        ("What is the cheapest drug of the class {group}, and its price?",),
        ("{group}中最便宜的药是哪个，多少钱？",),
        "The cheapest drug of the class {group} is {0} at {1} yuan.",
        "{group}中最便宜的是{0}，价格{1}元。",
        best=True,
    ),
    Template(
        "category",
        "SELECT name_{l}, price_yuan FROM drugs_info WHERE category_{l} = '{group}' ORDER BY price_yuan DESC LIMIT 1",
        ("Which drug of the class {group} is the most expensive, and what does it cost?",),
        ("{group}中最贵的药是哪个，价格是多少？",),
        "The most expensive drug of the class {group} is {0} at {1} yuan.",
        "{group}中最贵的是{0}，价格{1}元。",
        best=True,
    ),
    Template(
        "category",
        "SELECT round(avg(price_yuan), 1) FROM drugs_info WHERE category_{l} = '{group}'",
        ("What is the average price of drugs of the class {group}, to one decimal place?",),
        ("{group}的平均价格是多少元（保留一位小数）？",),
        "Drugs of the class {group} cost {0} yuan on average.",
        "{group}的平均价格为{0}元。",
    ),
    Template(
        "category",
        "SELECT count(*) FROM drugs_info WHERE category_{l} = '{group}' AND price_yuan < 100",
        ("How many drugs of the class {group} cost less than 100 yuan?",),
        ("{group}中有几种药低于100元？",),
        "{0} drugs of the class {group} cost less than 100 yuan.",
        "{group}中有{0}种药低于100元。",
    ),
    Template(
        "category",
        "SELECT count(*) FROM disease JOIN drugs_info ON drug_id = first_line_drug_id WHERE category_{l} = '{group}'",
        ("For how many diseases is a drug of the class {group} the first choice?",),
        ("有多少种疾病首选{group}？",),
        "A drug of the class {group} is the first choice for {0} diseases.",
        "有{0}种疾病首选{group}。",
    ),
    Template(
        "department",
        "SELECT count(*) FROM disease WHERE department_{l} = '{group}'",
        ("How many diseases does the department of {group} treat?",),
        ("{group}诊治多少种疾病？",),
        "The department of {group} treats {0} diseases.",
        "{group}诊治{0}种疾病。",
    ),
    Template(
        "department",
        "SELECT name_{l}, course_days FROM disease WHERE department_{l} = '{group}' ORDER BY course_days DESC LIMIT 1",
        ("Which disease of the department of {group} lasts longest, and how many days?",),
        ("{group}中病程最长的疾病是什么，多少天？",),
        "In {group}, {0} lasts longest: {1} days.",
        "{group}中病程最长的是{0}，为{1}天。",
        best=True,
    ),
    Template(
        "department",
        "SELECT name_{l}, course_days FROM disease WHERE department_{l} = '{group}' ORDER BY course_days LIMIT 1",
        ("Which disease of the department of {group} is over soonest, and after how many days?",),
        ("{group}中病程最短的疾病是什么，多少天？",),
        "In {group}, {0} is over soonest: after {1} days.",
        "{group}中病程最短的是{0}，为{1}天。",
        best=True,
    ),
    Template(
        "department",
        "SELECT count(*) FROM disease WHERE department_{l} = '{group}' AND contagious = 1",
        ("How many contagious diseases does the department of {group} treat?",),
        ("{group}有多少种传染性疾病？",),
        "The department of {group} treats {0} contagious diseases.",
        "{group}有{0}种传染性疾病。",
    ),
    Template(
        "maker",
        "SELECT count(*), round(avg(price_yuan), 1) FROM drugs_info WHERE manufacturer_{l} = '{group}'",
        ("How many drugs does {group} make, and what is their average price to one decimal place?",),
        ("{group}生产多少种药，平均价格是多少元（保留一位小数）？",),
        "{group} makes {0} drugs, which cost {1} yuan on average.",
        "{group}生产{0}种药，平均价格为{1}元。",
    ),
    Template(
        "form",
        "SELECT count(*) FROM drugs_info WHERE form_{l} = '{group}' AND prescription_{l} = '{no_prescription}'",
        ("How many drugs in the form of {group} are sold over the counter?",),
        ("剂型为{group}的非处方药有多少种？",),
        "{0} drugs in the form of {group} are sold over the counter.",
        "剂型为{group}的非处方药有{0}种。",
    ),
)

SUBJECTS = {  # what a template is about -> the column that names it
    "drug": "drugs_info.name",
    "two drugs": "drugs_info.name",
    "disease": "disease.name",
    "category": "drugs_info.category",
    "department": "disease.department",
    "maker": "drugs_info.manufacturer",
    "form": "drugs_info.form",
}
NO_PRESCRIPTION = {"en": "over the counter", "zh": "非处方药"}


def questions(db: sqlite3.Connection, rng: random.Random, count: int) -> list[dict]:
    """`count` different questions, half of them Chinese: {question, answer, facts, sql}. No subject is asked the same twice."""
    subjects = {about: _subjects(db, column) for about, column in SUBJECTS.items()}
    templates = {about: [t for t in TEMPLATES if t.about == about] for about in SUBJECTS}
    open_ = [(t, s) for t in TEMPLATES if t.about not in ("drug", "disease", "two drugs") for s in subjects[t.about]]
    for about in (
        "drug",
        "disease",
        "two drugs",
    ):  # entities outnumber groups: a third of the templates for each of them
        for subject in subjects[about]:
            some = max(len(templates[about]) // 3, 1)
            open_ += [(t, subject) for t in rng.sample(templates[about], some)]
    rng.shuffle(open_)
    out = []
    for template, subject in open_:
        if len(out) == count:
            return out
        other = rng.choice([s for s in subjects[template.about] if s != subject])
        if made := _question(db, rng, template, subject, other, ("en", "zh")[len(out) % 2]):
            out.append(made)
    raise ValueError(f"{count} medical questions were asked for, the templates give {len(out)}")


def _subjects(db: sqlite3.Connection, column: str) -> list[tuple[str, str]]:
    table, name = column.split(".")
    return db.execute(f"SELECT DISTINCT {name}_en, {name}_zh FROM {table} ORDER BY 1").fetchall()


def _question(db, rng, template: Template, subject, other, language: str) -> dict | None:
    n = ("en", "zh").index(language)
    names = {"l": language, "name": subject[n], "group": subject[n], "other": other[n]}
    names["no_prescription"] = NO_PRESCRIPTION[language]
    sql = template.sql.format(**names)
    result = db.execute(sql.removesuffix("LIMIT 1") + "LIMIT 2" if template.best else sql).fetchall()
    if not result or any(value is None for row in result for value in row):
        return None
    if template.best:
        if len(result) == 2 and result[0][-1] == result[1][-1]:
            return None
        result = result[:1]
    columns = [[str(v) for v in dict.fromkeys(column)] for column in zip(*result, strict=True)]
    facts = [f for column in columns for value in column for f in value.split(SEPARATOR[language])]
    if len(facts) > MOST_ITEMS:
        return None
    values = [SEPARATOR[language].join(column) for column in columns]
    answer = (template.answer_en, template.answer_zh)[n]
    assert {f for _, f, _, _ in Formatter().parse(answer) if f and f.isdigit()} == {
        str(i) for i in range(len(values))
    }, answer
    question = rng.choice((template.en, template.zh)[n]).format(**names)
    if any(f in question for f in facts if not f.isdigit()) and template.about != "two drugs":
        return None  # it would answer itself
    return {"question": question, "answer": answer.format(*values, **names), "facts": facts, "sql": sql}
