"""The word problems of mini_math: the text of a story, the ranges of its numbers, and its solution."""

from dataclasses import dataclass


@dataclass
class Story:
    draws: str  # name=low..high[/step] or name=word|word (_ for a space), blank-separated
    text: str
    solution: str
    held_out: bool = False


HELD_OUT = True
STORIES = [
    Story(
        "a=112..489 b=13..49 x=rolls|muffins|bagels|pretzels",
        "A bakery [packs|fills] {a} boxes [every week|each week]. [Each box holds {b} {x}|There are {b} {x} in each box]. How many {x} does the bakery pack [in a week|each week]?",
        "The bakery packs <t=a*b> {x} a week.",
    ),
    Story(
        "a=1250..9800 b=360..1240 x=stamps|coins|postcards|marbles",
        "{Name} [has|owns] {a} {x}. {She} [sells|gives away] {b} of them. How many {x} [does {name} have left|are left]?",
        "{Name} has <t=a-b> {x} left.",
    ),
    Story(
        "a=1340..8700 b=1120..7900 x=visitors|guests|children y=museum|zoo|castle",
        "[On Saturday a {y} had {a} {x}, and on Sunday {b} more came|In May a {y} counted {a} {x} and in June {b}]. How many {x} came [in total|altogether]?",
        "Altogether <t=a+b> {x} came.",
    ),
    Story(
        "a=1008..9936 b=12..36 x=eggs|pencils|bulbs|tiles",
        "A shop [has|must pack] {a} {x}. They [go into|are packed in] boxes of {b}. How many boxes are needed?",
        "The {x} fill <t=a/b> boxes.",
    ),
    Story(
        "a=14..48 p=2.25..19.75/.25 x=notebooks|mugs|plants|scarves",
        "{Name} buys {a} {x} for ${p} each. How much [does {she} pay|does {name} spend] [in dollars|in total, in dollars]?",
        "{Name} pays $<t=a*p>.",
    ),
    Story(
        "a=1260..8840 b=115..990 x=letters|stickers|shells",
        "{Name} [collected|found] {a} {x}. {Other} [gave|sent] {her} {b} more. How many {x} does {name} have now?",
        "{Name} has <t=a+b> {x} now.",
    ),
    Story(
        "a=1150..6900 b=210..1100 x=liters|gallons y=tank|barrel|pool",
        "A {y} holds {a} {x} of water. {b} {x} [flow out|are used]. How many {x} are left in the {y}?",
        "<t=a-b> {x} are left.",
    ),
    Story(
        "a=14..46 b=12..38 x=trees|lamps|benches",
        "A park has {a} rows of {x} with {b} {x} in [every|each] row. How many {x} [are there|does the park have]?",
        "The park has <t=a*b> {x}.",
    ),
    Story(
        "a=1050..9800 b=4..18 x=coins|cards|marbles",
        "{b} friends [share|divide] {a} {x} equally. How many {x} does each friend get?",
        "Each friend gets <t=a/b> {x}.",
    ),
    Story(
        "a=1400..7900 b=310..1350 x=meters|steps",
        "{Name} has to walk {a} {x} and has [already walked|done] {b}. How many {x} are [left|still to go]?",
        "<t=a-b> {x} are left.",
    ),
    Story(
        "a=24..95 b=13..56 x=pages|chapters|letters",
        "{Name} [reads|writes] {a} {x} a day. How many {x} [does {name} manage|is that] in {b} days?",
        "In {b} days that is <t=a*b> {x}.",
    ),
    Story(
        "a=1230..8700 b=1040..7600 x=boxes|bags|sacks y=morning|first_hour",
        "A truck [brings|delivers] {a} {x} in the {y} and {b} {x} later. How many {x} [does it bring|arrive] in total?",
        "In total <t=a+b> {x} arrive.",
    ),
    Story(
        "a=320..4900 b=5..35 x=plums|nuts|beans",
        "{a} {x} are [put|packed] into {b} equal bags. How many {x} are in each bag?",
        "Each bag holds <t=a/b> {x}.",
    ),
    Story(
        "a=1300..5600 b=150..1200 x=bike|desk|phone",
        "{Name} saves ${a}. A {x} costs ${b}. How many dollars [are left|does {name} keep] after buying it?",
        "{Name} keeps $<t=a-b>.",
    ),
    Story(
        "w=13..49 h=14..60",
        "{Name} earns ${w} [an hour|per hour] and works {h} hours. How many dollars does {name} [earn|make]?",
        "{Name} earns $<t=w*h>.",
    ),
    Story(
        "a=1120..9300 b=140..980 x=fans|members|players y=club|team|choir",
        "A {y} had {a} {x} last year. This year it has {b} more. How many {x} does it have this year?",
        "This year it has <t=a+b> {x}.",
    ),
    Story(
        "a=240..3900 b=6..28 x=bricks|tiles|planks",
        "A builder lays {b} {x} [an hour|every hour]. How many hours does [it take to lay|the builder need for] {a} {x}?",
        "It takes <t=a/b> hours.",
    ),
    Story(
        "a=118..420 b=14..48 c=310..1900 x=rolls|buns|pies",
        "{Name} bakes {a} trays of {x} with {b} {x} on each[ tray|]. {She} [sells|delivers] {c} of them. How many {x} [are left|does {name} have left]?",
        "{Name} bakes <t=a*b> {x}.\n{She} has <u=t-c> {x} left.",
    ),
    Story(
        "a=23..68 b=17..58 c=2..9 x=seats|chairs",
        "A [hall|theatre] has {a} rows [of|with] {b} {x} each. {c} {x} in every row are [broken|reserved]. How many {x} can be [used|sold]?",
        "Every row has <t=b-c> {x} that can be used.\nThe whole hall has <u=a*t> such {x}.",
    ),
    Story(
        "a=36..96 b=27..88 p=2..14 x=tickets|cakes|badges",
        "{Name} sold {a} {x} on Monday and {b} {x} on Tuesday. Each [one|of them] cost ${p}. How [much money|many dollars] did {name} [take in|make][ altogether|]?",
        "{Name} sold <t=a+b> {x}.\n{She} made $<u=t*p>.",
    ),
    Story(
        "a=340..960 b=13..29 c=1500..4200 x=trees|vines|bushes",
        "A [farm|nursery] has {c} {x} and plants {a} more [every month|each month]. How many {x} [will it have|are there] after {b} months?",
        "In {b} months it plants <t=a*b> {x}.\nThen it has <u=t+c> {x}.",
    ),
    Story(
        "a=640..6400/20 p=5..45/5 x=students|teachers|visitors y=walk|cycle",
        "{a} {x} come to a [college|campus] every day. {p}% of them {y}[ there|]. How many {x} do not {y}?",
        "<t=a*p/100> {x} {y}.\n<u=a-t> {x} do not.",
    ),
    Story(
        "a=80..960/4 p=5..60/5 x=bicycle|sofa|camera|coat",
        "A {x} costs ${a}. [In a sale|This week] its price is [cut|reduced] by {p}%. [What is the new price in dollars|How many dollars does it cost now]?",
        "The price falls by $<t=a*p/100>.\nThe new price is $<u=a-t>.",
    ),
    Story(
        "a=1120..7650 b=1040..6800 c=3..9 x=books|letters|parcels y=vans|shelves|rooms",
        "There are {a} {x} in one [store|hall] and {b} {x} in another. They are [shared|split] equally among {c} {y}. How many {x} [does each of the {y} get|go to each of the {y}]?",
        "Together there are <t=a+b> {x}.\nEach of the {y} gets <u=t/c> {x}.",
    ),
    Story(
        "a=46..89 h=3..9 d=12..28 x=km|miles",
        "A [truck|bus] drives at {a} {x} per hour for {h} hours [every day|each day]. How [far does it drive|many {x} does it cover] in {d} days?",
        "It drives <t=a*h> {x} a day.\nIn {d} days it drives <u=t*d> {x}.",
    ),
    Story(
        "w=14..39 h=22..41 d=120..480",
        "{Name} earns ${w} an hour and works {h} hours a week. [Every week|Each week] {she} spends ${d}. How many dollars does {she} [save|keep] in a week?",
        "{Name} earns $<t=w*h> a week.\n{She} saves $<u=t-d>.",
    ),
    Story(
        "a=26..84 k=3..9 x=stickers|shells|cards",
        "{Name} has {a} {x}. {Other} has {k} times as many[ as {name}|]. How many {x} do they have [together|altogether]?",
        "{Other} has <t=a*k> {x}.\nTogether they have <u=a+t> {x}.",
    ),
    Story(
        "a=36..144 b=18..42 c=24..96 d=12..38 x=apples|pears|plums y=oranges|lemons|limes",
        "A shop gets {a} crates [of|with] {b} {x} each and {c} crates [of|with] {d} {y} each. How many pieces of fruit [does it get|arrive] [in all|altogether]?",
        "It gets <t=a*b> {x}.\nIt gets <u=c*d> {y}.\nAltogether that is <v=t+u> pieces of fruit.",
    ),
    Story(
        "a=12..36 p=3..18 b=6..24 q=11..49 m=600..2500/50 x=brushes|cups|bowls y=lamps|vases|frames",
        "{Name} has ${m}. {She} buys {a} {x} at ${p} each and {b} {y} at ${q} each. How many dollars [does {she} have left|are left]?",
        "The {x} cost $<t=a*p>.\nThe {y} cost $<u=b*q>.\nTogether that is $<v=t+u>.\n{Name} has $<w=m-v> left.",
    ),
    Story(
        "a=120..460 b=14..38 k=4..12 x=candles|soaps|toys",
        "A workshop makes {a} {x} a day. [It works for|After] {b} days[| of work], [it packs|] all {x} [|are packed ]in boxes of {k}. How many boxes are filled?",
        "The workshop makes <t=a*b> {x}.\nThey fill <u=t/k> boxes.",
    ),
    Story(
        "a=180..640 b=35..160 c=4..18",
        "{Name} [reads|is reading] a book of {a} pages. {She} has [already |]read {b} pages. From now on {she} reads {c} pages [a day|each day]. How many days does {she} need [to finish it|for the rest]?",
        "{Name} still has <t=a-b> pages to read.\n{She} needs <u=t/c> days.",
    ),
    Story(
        "a=24..90 b=16..72 p=6..15 q=3..5 x=concert|play|film",
        "[Tickets for a {x} cost|A ticket for a {x} is] ${p} for adults and ${q} for children. {a} adults and {b} children [come|buy tickets]. How many dollars are [taken in|paid]?",
        "The adults pay $<t=a*p>.\nThe children pay $<u=b*q>.\nTogether they pay $<v=t+u>.",
    ),
    Story(
        "a=42..98 b=26..74 p=12..48 c=340..2100",
        "A [gardener|builder] paves a [yard|square] {a} meters long and {b} meters wide. [Each square meter costs ${p}|The stones cost ${p} per square meter]. Delivery [costs another|adds] ${c}. What is the total cost in dollars?",
        "The area is <t=a*b> square meters.\nThat costs $<u=t*p>.\nWith delivery it is $<v=u+c>.",
    ),
    Story(
        "l=38..190 w=22..140 p=4..19",
        "A [field|garden] is {l} meters long and {w} meters wide. {Name} puts a fence [all |]around it. One meter [of fence |]costs ${p}. How many dollars does the fence cost?",
        "Length and width together are <t=l+w> meters.\nThe way around is <u=t*2> meters.\nThe fence costs $<v=u*p>.",
    ),
    Story(
        "a=340..990 b=45..160 c=28..95 d=3..8 x=cars|phones|bikes",
        "A factory [builds|makes] {a} {x} [a month|each month]. Of these, {b} are [exported|sent abroad] and {c} are [faulty|kept for tests]; the rest go [in equal numbers |equally ]to {d} shops. How many {x} does each shop get?",
        "<t=b+c> {x} do not go to the shops.\n<u=a-t> {x} are left.\nEach shop gets <v=u/d> {x}.",
    ),
    Story(
        "a=120..480 k=2..5 m=14..60 x=sheep|goats|hens",
        "{Name} has {a} {x}. {Other} has {k} times as many, and {third} has {m} fewer than {other}. How many {x} does {third} have?",
        "{Other} has <t=a*k> {x}.\n{Third} has <u=t-m> {x}.",
    ),
    Story(
        "m=900..4800/60 f=2..6 p=5..40/5 x=rent|travel",
        "{Name} earns ${m} a month. {She} spends 1/{f} of it on {x} and {p}% of it on food. How many dollars are left?",
        "The {x} [costs|takes] $<t=m/f>.\nFood costs $<u=m*p/100>.\nTogether that is $<v=t+u>.\n{Name} has $<w=m-v> left.",
    ),
    Story(
        "a=18..64 b=14..52 d=120..380 x=calls|letters|orders",
        "An office gets {a} {x} an hour in the morning and {b} {x} an hour in the afternoon. The morning has 4 hours and the afternoon 5. {d} {x} are answered. How many are still open?",
        "In the morning <t=a*4> {x} come in.\nIn the afternoon <u=b*5> {x} come in.\nThat makes <v=t+u> {x}.\n<w=v-d> are still open.",
    ),
    Story(
        "a=1300..7400 b=240..980 c=310..1150 d=150..640 y=tank|pool|reservoir",
        "A {y} holds {a} liters of water. On the first day {b} liters are used, on the second {c}, and then {d} liters of rain [flow in|are added]. How many liters are in the {y} now?",
        "After the first day <t=a-b> liters are left.\nAfter the second day <u=t-c> liters are left.\nWith the rain there are <v=u+d> liters.",
    ),
    Story(
        "a=45..95 b=62..98 c=51..99 d=40..97",
        "In four [games|rounds] {name} scored {a}, {b}, {c} and {d} points. What is {her} average [score|number of points]?",
        "{Name} scored <t=a+b+c+d> points.\nThe average is <u=t/4> points.",
    ),
    Story(
        "a=24..72 p=14..45 q=21..88 c=115..560 x=jackets|chairs|watches",
        "{Name} buys {a} {x} at ${p} each and sells [them|all of them] at ${q} each. {She} also pays ${c} for the stand. How many dollars does {she} [earn|gain] [in the end|in total]?",
        "{She} [gains|earns] $<t=q-p> on each.\nFor all of them that is $<u=a*t>.\nAfter the stand {she} keeps $<v=u-c>.",
    ),
    Story(
        "a=160..420 b=12..36 c=85..240 d=6..24",
        "{Name} [runs|walks] {a} meters {b} times a week, and {other} [runs|walks] {c} meters {d} times a week. How many meters more does {name} cover in a week?",
        "{Name} covers <t=a*b> meters.\n{Other} covers <u=c*d> meters.\n{Name} covers <v=t-u> meters more.",
    ),
    Story(
        "a=8..30 g=125..950/25 b=6..24 h=150..850/50",
        "A parcel holds {a} [jars|tins] of {g} grams each and {b} [bags|packets] of {h} grams each. The empty box weighs 480 grams. How many grams does the parcel weigh?",
        "The first goods weigh <t=a*g> grams.\nThe others weigh <u=b*h> grams.\nAll goods weigh <v=t+u> grams.\nWith the box it is <w=v+480> grams.",
    ),
    Story(
        "m=1800..9600/100 p=4..35 q=5..30/5 x=laptop|stove|piano",
        "A shop buys a {x} for ${m} and raises the price by {p}%. [Later|In spring] the new price is cut by {q}%. What is the final price in dollars?",
        "The price goes up by $<t=m*p/100>.\nIt is then $<u=m+t>.\nThe cut is $<v=u*q/100>.\nThe final price is $<w=u-v>.",
    ),
    Story(
        "a=36..84 y=6..16 k=120..380 n=3..7 x=roses|tulips|lilies",
        "A florist [cuts|orders] {a} bundles of {y} {x}. {k} {x} [wilt|are spoilt]. From the rest {she} ties bouquets of {n} {x} and sells each for $18. How many dollars does {she} make if every bouquet is sold?",
        "There are <t=a*y> {x}.\n<u=t-k> {x} are left.\nThat gives <v=u/n> bouquets.\nThey bring in $<w=v*18>.",
    ),
    Story(
        "a=24..68 b=12..36 p=3..9 c=14..45 q=2..8 d=150..900 x=hats|scarves|belts y=gloves|socks|ties",
        "A stall sells {a} {x} at ${p} each and {c} pairs of {y} at ${q} each[ every day|, day after day]. It is open {b} days[ in a season|] and pays ${d} for the place. How many dollars are left[ at the end|]?",
        "The {x} bring $<t=a*p> a day.\nThe {y} bring $<u=c*q> a day.\nA day brings $<v=t+u>.\n{b} days bring $<w=b*v>.\nAfter the place is paid there are $<z=w-d>.",
    ),
    Story(
        "a=36..84 b=112..480 c=13..45 d=4..12 e=150..900/5 x=tiles|bricks|planks",
        "A truck brings {a} pallets of {b} {x}. {c} {x} on every pallet are broken, and {e} of the good ones go to a neighbor. The others are laid by {d} workers in equal parts. How many {x} does each worker lay?",
        "<t=b-c> {x} on a pallet are good.\nThat makes <u=a*t> good {x}.\n<v=u-e> {x} are left.\nEach worker lays <w=v/d> {x}.",
    ),
    Story(
        "a=1250..4800/50 p=5..35/5 b=230..780 c=2..6 x=tickets|seats",
        "A stadium has {a} {x}. {p}% of them are kept for members and {b} for the press. The others are sold through {c} shops in equal numbers. How many {x} does each shop sell?",
        "Members have <t=a*p/100> {x}.\nTogether <u=t+b> {x} are kept.\n<v=a-u> {x} are sold.\nEach shop sells <w=v/c> {x}.",
    ),
    Story(
        "w=15..38 h=24..39 k=12..48 n=26..52 y=23..61",
        "{Name} is {y} years old and earns ${w} an hour. {She} works {h} hours a week and saves ${k} of each week's pay. How many dollars does {she} spend in {n} weeks?",
        "{Name} earns $<t=w*h> a week.\n{She} spends $<u=t-k> a week.\nIn {n} weeks that is $<v=u*n>.",
    ),
    Story(
        "a=2.25..9.75/.25 b=14..42 c=1.5..6.5/.5 d=16..38 x=sandwiches|salads|pizzas y=drinks|cookies|ice_creams",
        "For a party {name} orders {b} {x} at ${a} each and {d} {y} at ${c} each. [What is the bill in dollars|How many dollars is that in all]?",
        "The {x} cost $<t=b*a>.\nThe {y} cost $<u=d*c>.\nThe bill is $<v=t+u>.",
    ),
    Story(
        "a=112..380 b=3..8 c=28..75 x=kilometers|miles",
        "A [cyclist|driver] covers {a} {x} a day. After {b} days [of riding|on the road], {c} {x} are still ahead. How long is the whole way in {x}?",
        "In {b} days <t=a*b> {x} are covered.\nThe whole way is <u=t+c> {x}.",
    ),
    # met in test only: known steps in an order that no train story has
    Story(
        "a=1200..6400/20 p=10..45/5 c=4..12 x=books|seeds|shirts",
        "A store has {a} {x}. {p}% of them are sold online. The rest is put on {c} shelves in equal numbers. How many {x} are on each shelf?",
        "<t=a*p/100> {x} are sold online.\n<u=a-t> {x} are left.\nEach shelf gets <v=u/c> {x}.",
        HELD_OUT,
    ),
    Story(
        "w=14..38 a=5..9 b=12..24 p=10..30/5",
        "{Name} earns ${w} an hour and works {a} hours a day for {b} days. {p}% of the pay goes to taxes. How many dollars does {she} get?",
        "{Name} works <t=a*b> hours.\n{She} earns $<u=t*w>.\nTaxes are $<v=u*p/100>.\n{She} gets $<z=u-v>.",
        HELD_OUT,
    ),
    Story(
        "a=24..72 b=18..48 k=3..6 p=2..9 x=melons|pumpkins|cabbages",
        "{Name} picks {a} {x}, {other} picks {k} times as many, and {third} picks {b}. They sell all of them at ${p} each. How many dollars do they make?",
        "{Other} picks <t=a*k> {x}.\nAll three pick <u=a+t+b> {x}.\nThey make $<v=u*p>.",
        HELD_OUT,
    ),
    Story(
        "a=240..960 b=14..36 c=2100..5200 d=6..12 x=bottles|bricks|cans",
        "A plant makes {a} {x} an hour. It had {c} {x} in store, runs for {b} hours and then loads everything on {d} trucks in equal parts. How many {x} are on each truck?",
        "It makes <t=a*b> {x}.\nWith the store there are <u=t+c> {x}.\nEach truck carries <v=u/d> {x}.",
        HELD_OUT,
    ),
]
