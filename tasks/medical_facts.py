"""The medical database: two tables of invented drugs and diseases, in English and Chinese, made from a seed.

    drugs_info  240 drugs: 20 real classes x 12 invented name stems (Arveolol is a beta blocker, Arvepril an ACE inhibitor)
    disease     240 diseases: 20 common conditions x 12 invented eponyms (Corden gastritis)

Every product and disease is fictional, its properties only resemble those of its class. Nothing here is medical advice.
"""

import random
import sqlite3
from contextlib import closing
from pathlib import Path

STEMS = (
    "Arve 阿维, Belto 贝托, Corvi 科维, Danu 达努, Elmi 埃米, Farno 法诺, Galve 加维, Hesti 赫斯, Ivora 伊沃, Kelmo 克莫,"
    " Nalvo 纳沃, Orbi 奥比"
)
EPONYMS = (
    "Arlen 阿伦, Brisk 布里斯, Corden 科登, Dovar 多瓦, Eskel 埃斯克, Fenwood 芬伍德, Garrow 加罗, Hollin 霍林, Istra 伊斯特,"
    " Jorvik 约维, Kestrel 凯斯特, Lomax 洛马"
)
MAKERS = "Northlake Pharma 北湖制药, Qinghe Labs 清和药业, Solvent Hill 索文山, Jinshan Biotech 金杉生物, Meridian Care 子午医药"
FORMS = {"tablet": "片剂", "capsule": "胶囊", "syrup": "糖浆", "inhaler": "吸入剂", "injection": "注射剂"}

# class; suffix; indications; side effects; contraindications; dosage forms; strengths in mg; sold without prescription
CLASSES = """
beta blocker β受体阻滞剂; olol 洛尔; hypertension 高血压, tachycardia 心动过速; dizziness 头晕, fatigue 乏力, cold hands 手脚发凉; asthma 哮喘, severe bradycardia 严重心动过缓; tablet; 25 50 100; no
ACE inhibitor 血管紧张素转换酶抑制剂; pril 普利; hypertension 高血压, heart failure 心力衰竭; dry cough 干咳, dizziness 头晕, high potassium 高血钾; pregnancy 妊娠, angioedema 血管性水肿; tablet; 5 10 20; no
statin 他汀类; vastatin 伐他汀; high cholesterol 高胆固醇血症, arterial plaque 动脉斑块; muscle pain 肌肉疼痛, nausea 恶心, raised liver enzymes 肝酶升高; active liver disease 活动性肝病, pregnancy 妊娠; tablet; 10 20 40; no
proton pump inhibitor 质子泵抑制剂; prazole 拉唑; gastric ulcer 胃溃疡, acid reflux 胃酸反流; headache 头痛, diarrhoea 腹泻, bloating 腹胀; severe liver damage 严重肝损害, low magnesium 低镁血症; capsule tablet; 20 40; yes
penicillin 青霉素类; cillin 西林; bacterial infection 细菌感染, throat infection 咽喉感染; rash 皮疹, diarrhoea 腹泻, nausea 恶心; penicillin allergy 青霉素过敏, glandular fever 传染性单核细胞增多症; capsule injection; 250 500; no
macrolide 大环内酯类; thromycin 红霉素; lung infection 肺部感染, skin infection 皮肤感染; nausea 恶心, abdominal pain 腹痛, metallic taste 口中金属味; severe liver damage 严重肝损害, heart rhythm disorder 心律失常; tablet syrup; 125 250 500; no
quinolone 喹诺酮类; floxacin 沙星; urinary infection 尿路感染, bowel infection 肠道感染; tendon pain 肌腱疼痛, dizziness 头晕, insomnia 失眠; childhood 儿童期, epilepsy 癫痫; tablet injection; 200 400; no
azole antifungal 唑类抗真菌药; conazole 康唑; fungal infection 真菌感染, thrush 念珠菌病; nausea 恶心, rash 皮疹, raised liver enzymes 肝酶升高; active liver disease 活动性肝病, pregnancy 妊娠; capsule; 50 100 150; no
nucleoside antiviral 核苷类抗病毒药; ciclovir 昔洛韦; herpes 疱疹, shingles 带状疱疹; headache 头痛, nausea 恶心, fatigue 乏力; severe kidney damage 严重肾损害, dehydration 脱水; tablet; 200 400 800; no
antihistamine 抗组胺药; tadine 他定; allergic rhinitis 过敏性鼻炎, urticaria 荨麻疹; drowsiness 嗜睡, dry mouth 口干, headache 头痛; glaucoma 青光眼, severe kidney damage 严重肾损害; tablet syrup; 5 10; yes
anti-inflammatory painkiller 非甾体抗炎药; profen 洛芬; joint pain 关节痛, fever 发热; stomach pain 胃痛, heartburn 烧心, rash 皮疹; active ulcer 活动性溃疡, severe kidney damage 严重肾损害; tablet syrup; 200 400; yes
benzodiazepine 苯二氮䓬类; zepam 西泮; anxiety 焦虑, insomnia 失眠; drowsiness 嗜睡, memory loss 记忆减退, unsteady gait 步态不稳; sleep apnoea 睡眠呼吸暂停, alcohol dependence 酒精依赖; tablet; 1 2 5; no
antidepressant 抗抑郁药; oxetine 西汀; depression 抑郁症, panic disorder 惊恐障碍; nausea 恶心, insomnia 失眠, sweating 多汗; mania 躁狂, uncontrolled epilepsy 未控制的癫痫; capsule; 10 20 40; no
gliptin antidiabetic 列汀类降糖药; gliptin 格列汀; adult diabetes 成人糖尿病, insulin resistance 胰岛素抵抗; joint pain 关节痛, headache 头痛, low blood sugar 低血糖; ketoacidosis 酮症酸中毒, pancreatitis 胰腺炎; tablet; 25 50 100; no
bronchodilator 支气管扩张剂; terol 特罗; asthma 哮喘, chronic bronchitis 慢性支气管炎; tremor 手抖, palpitations 心悸, headache 头痛; overactive thyroid 甲状腺功能亢进, heart rhythm disorder 心律失常; inhaler syrup; 1 2 4; no
corticosteroid 糖皮质激素; sonide 奈德; eczema 湿疹, severe asthma 重度哮喘; hoarse voice 声音嘶哑, weight gain 体重增加, mood swings 情绪波动; untreated tuberculosis 未治疗的结核病, systemic fungal infection 全身真菌感染; inhaler tablet; 2 4 8; no
loop diuretic 袢利尿剂; semide 塞米; oedema 水肿, heart failure 心力衰竭; low potassium 低血钾, thirst 口渴, dizziness 头晕; anuria 无尿, dehydration 脱水; tablet injection; 20 40; no
anticoagulant 抗凝药; xaban 沙班; venous thrombosis 静脉血栓, atrial fibrillation 心房颤动; bleeding 出血, bruising 瘀斑, anaemia 贫血; active bleeding 活动性出血, severe liver damage 严重肝损害; tablet; 5 10 15; no
anticonvulsant 抗癫痫药; racetam 拉西坦; epilepsy 癫痫, nerve pain 神经痛; drowsiness 嗜睡, irritability 易怒, fatigue 乏力; severe kidney damage 严重肾损害, psychosis 精神病; tablet injection; 250 500 750; no
antiemetic 止吐药; setron 司琼; vomiting 呕吐, motion sickness 晕动病; constipation 便秘, headache 头痛, flushing 面部潮红; heart rhythm disorder 心律失常, bowel obstruction 肠梗阻; tablet injection; 4 8; yes
"""

# condition; department; symptoms (three are drawn); causes (one is drawn); prevention (one); drug class; incubation in days, "-" where not contagious; course in days
CONDITIONS = """
gastritis 胃炎; Gastroenterology 消化内科; stomach pain 胃痛, bloating 腹胀, nausea 恶心, loss of appetite 食欲减退, heartburn 烧心; excess gastric acid 胃酸过多, irregular meals 饮食不规律; regular meals 规律饮食, less alcohol 少饮酒; proton pump inhibitor; -; 14 42
enteritis 肠炎; Gastroenterology 消化内科; diarrhoea 腹泻, abdominal pain 腹痛, fever 发热, dehydration 脱水, vomiting 呕吐; contaminated food 食物污染, bacterial toxins 细菌毒素; clean water 饮用洁净水, hand washing 勤洗手; quinolone; 1 6; 4 12
pneumonia 肺炎; Respiratory Medicine 呼吸内科; cough 咳嗽, fever 发热, chest pain 胸痛, shortness of breath 气短, sputum 咳痰; lung bacteria 肺部细菌, weak immunity 免疫力低下; vaccination 接种疫苗, no smoking 戒烟; macrolide; 2 14; 10 28
asthma 哮喘; Respiratory Medicine 呼吸内科; wheezing 喘息, shortness of breath 气短, night cough 夜间咳嗽, chest tightness 胸闷, fatigue 乏力; pollen 花粉, dust mites 尘螨; avoiding allergens 避免过敏原, air filters 空气过滤; bronchodilator; -; 90 365
pharyngitis 咽炎; Otolaryngology 耳鼻喉科; sore throat 咽痛, fever 发热, hoarse voice 声音嘶哑, swollen glands 淋巴结肿大, difficulty swallowing 吞咽困难; throat bacteria 咽部细菌, dry air 空气干燥; hand washing 勤洗手, warm drinks 多喝温水; penicillin; 1 5; 5 14
rhinitis 鼻炎; Otolaryngology 耳鼻喉科; sneezing 打喷嚏, runny nose 流鼻涕, itchy eyes 眼痒, blocked nose 鼻塞, headache 头痛; pollen 花粉, animal hair 动物毛发; avoiding allergens 避免过敏原, nasal rinsing 鼻腔冲洗; antihistamine; -; 14 60
dermatitis 皮炎; Dermatology 皮肤科; itching 瘙痒, redness 红斑, dry skin 皮肤干燥, blisters 水疱, scaling 脱屑; contact allergy 接触过敏, stress 精神压力; skin care 皮肤护理, mild soap 温和清洁; corticosteroid; -; 14 56
mycosis 真菌病; Dermatology 皮肤科; itching 瘙痒, scaling 脱屑, cracked skin 皮肤皲裂, nail changes 指甲改变, redness 红斑; skin fungi 皮肤真菌, damp shoes 鞋袜潮湿; dry feet 保持足部干燥, own towels 毛巾专用; azole antifungal; 4 20; 21 84
herpes 疱疹; Dermatology 皮肤科; blisters 水疱, burning pain 灼痛, itching 瘙痒, fever 发热, swollen glands 淋巴结肿大; latent virus 潜伏病毒, close contact 密切接触; avoiding contact 避免接触, rest 充足休息; nucleoside antiviral; 2 12; 7 21
arthritis 关节炎; Rheumatology 风湿科; joint pain 关节痛, morning stiffness 晨僵, swelling 肿胀, limited movement 活动受限, fatigue 乏力; autoimmunity 自身免疫, joint wear 关节磨损; gentle exercise 适度锻炼, weight control 控制体重; anti-inflammatory painkiller; -; 60 365
hypertension 高血压; Cardiology 心内科; headache 头痛, dizziness 头晕, nosebleed 鼻出血, blurred vision 视物模糊, palpitations 心悸; too much salt 盐摄入过多, family history 家族史; less salt 低盐饮食, regular exercise 规律运动; ACE inhibitor; -; 180 720
tachycardia 心动过速; Cardiology 心内科; palpitations 心悸, dizziness 头晕, chest tightness 胸闷, fainting 晕厥, fatigue 乏力; stress 精神压力, too much caffeine 咖啡因过量; less caffeine 少喝咖啡, relaxation 放松训练; beta blocker; -; 30 180
heart failure 心力衰竭; Cardiology 心内科; oedema 水肿, shortness of breath 气短, fatigue 乏力, weight gain 体重增加, night cough 夜间咳嗽; damaged heart muscle 心肌受损, long hypertension 长期高血压; less salt 低盐饮食, daily weighing 每日称重; loop diuretic; -; 180 720
thrombosis 血栓症; Vascular Surgery 血管外科; leg swelling 腿肿, leg pain 腿痛, warm skin 皮温升高, redness 红斑, heaviness 沉重感; long bed rest 长期卧床, thick blood 血液黏稠; movement 多活动, compression stockings 弹力袜; anticoagulant; -; 90 180
hyperlipidaemia 高脂血症; Endocrinology 内分泌科; fatty skin deposits 皮肤脂肪沉积, fatigue 乏力, dizziness 头晕, leg cramps 小腿抽筋, chest tightness 胸闷; fatty food 高脂饮食, inherited metabolism 遗传代谢; less fat 低脂饮食, regular exercise 规律运动; statin; -; 180 720
diabetes 糖尿病; Endocrinology 内分泌科; thirst 口渴, frequent urination 多尿, weight loss 体重下降, blurred vision 视物模糊, fatigue 乏力; insulin resistance 胰岛素抵抗, overweight 超重; less sugar 控制糖分, weight control 控制体重; gliptin antidiabetic; -; 365 900
neuralgia 神经痛; Neurology 神经内科; stabbing pain 刺痛, numbness 麻木, tingling 刺麻感, burning pain 灼痛, insomnia 失眠; nerve pressure 神经受压, viral damage 病毒损伤; good posture 正确姿势, warmth 注意保暖; anticonvulsant; -; 30 180
depression 抑郁症; Psychiatry 精神科; low mood 情绪低落, insomnia 失眠, loss of appetite 食欲减退, poor concentration 注意力下降, fatigue 乏力; stress 精神压力, family history 家族史; social contact 多与人交往, regular sleep 规律睡眠; antidepressant; -; 120 360
anxiety disorder 焦虑症; Psychiatry 精神科; restlessness 坐立不安, palpitations 心悸, sweating 多汗, insomnia 失眠, tremor 手抖; stress 精神压力, too much caffeine 咖啡因过量; relaxation 放松训练, regular sleep 规律睡眠; benzodiazepine; -; 60 240
cystitis 膀胱炎; Urology 泌尿外科; painful urination 尿痛, frequent urination 多尿, lower belly pain 下腹痛, cloudy urine 尿液浑浊, fever 发热; urinary bacteria 尿路细菌, too little drinking 饮水过少; drinking enough 多喝水, warm clothing 注意保暖; quinolone; -; 3 10
"""

DRUG_COLUMNS = (
    "drug_id INTEGER PRIMARY KEY, name_en TEXT, name_zh TEXT, category_en TEXT, category_zh TEXT, indication_en TEXT,"
    " indication_zh TEXT, side_effects_en TEXT, side_effects_zh TEXT, contraindication_en TEXT, contraindication_zh TEXT,"
    " form_en TEXT, form_zh TEXT, strength_mg INTEGER, max_daily_mg INTEGER, price_yuan REAL, prescription_en TEXT,"
    " prescription_zh TEXT, shelf_life_months INTEGER, manufacturer_en TEXT, manufacturer_zh TEXT"
)
DISEASE_COLUMNS = (
    "disease_id INTEGER PRIMARY KEY, name_en TEXT, name_zh TEXT, department_en TEXT, department_zh TEXT, symptoms_en TEXT,"
    " symptoms_zh TEXT, cause_en TEXT, cause_zh TEXT, prevention_en TEXT, prevention_zh TEXT, contagious INTEGER,"
    " incubation_days INTEGER, course_days INTEGER, first_line_drug_id INTEGER REFERENCES drugs_info(drug_id)"
)
SEPARATOR = {"en": ", ", "zh": "、"}  # between the items of a cell


def pairs(text: str) -> list[tuple[str, str]]:
    """ "dry cough 干咳, rash 皮疹" -> [("dry cough", "干咳"), ("rash", "皮疹")]"""
    return [tuple(item.strip().rsplit(" ", 1)) for item in text.split(",")]


def join(items: list[tuple[str, str]]) -> tuple[str, str]:
    return tuple(SEPARATOR[language].join(i[n] for i in items) for n, language in enumerate(("en", "zh")))


def drugs(rng: random.Random) -> list[tuple]:
    rows = []
    for line in CLASSES.strip().splitlines():
        category, suffix, indications, effects, warnings, forms, strengths, free = (p.strip() for p in line.split(";"))
        for stem in pairs(STEMS):
            name = [s + e for s, e in zip(stem, pairs(suffix)[0], strict=True)]
            strength = int(rng.choice(strengths.split()))
            form = rng.choice(forms.split())
            prescription = (
                ("over the counter", "非处方药") if free == "yes" and rng.random() < 0.5 else ("prescription", "处方药")
            )
            rows.append(
                (len(rows) + 1, *name, *pairs(category)[0])
                + join(rng.sample(pairs(indications), rng.choice((1, 2))))
                + join(rng.sample(pairs(effects), 2))
                + rng.choice(pairs(warnings))
                + (
                    form,
                    FORMS[form],
                    strength,
                    strength * rng.choice((2, 3, 4)),
                    rng.randrange(80, 2400) / 10,
                    *prescription,
                )
                + (rng.choice((18, 24, 30, 36, 48)), *rng.choice(pairs(MAKERS)))
            )
    return rows


def diseases(rng: random.Random, drug_rows: list[tuple]) -> list[tuple]:
    rows = []
    for line in CONDITIONS.strip().splitlines():
        condition, department, symptoms, causes, preventions, category, incubation, course = (
            p.strip() for p in line.split(";")
        )
        for eponym in pairs(EPONYMS):
            (english, chinese), (who, who_zh) = pairs(condition)[0], eponym
            days = None if incubation == "-" else rng.randint(*map(int, incubation.split()))
            drug = rng.choice([d[0] for d in drug_rows if d[3] == category])
            rows.append(
                (len(rows) + 1, f"{who} {english}", who_zh + chinese, *pairs(department)[0])
                + join(rng.sample(pairs(symptoms), 3))
                + rng.choice(pairs(causes))
                + rng.choice(pairs(preventions))
                + (int(days is not None), days, rng.randint(*map(int, course.split())), drug)
            )
    return rows


def write_database(path: Path, seed: int) -> None:
    rng = random.Random(f"{seed}/medical")
    drug_rows = drugs(rng)
    with closing(sqlite3.connect(path)) as db, db:
        for table, columns, rows in (
            ("drugs_info", DRUG_COLUMNS, drug_rows),
            ("disease", DISEASE_COLUMNS, diseases(rng, drug_rows)),
        ):
            db.execute(f"CREATE TABLE {table} ({columns})")
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
