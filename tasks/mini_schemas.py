"""The databases of the embedded mini_sql task, declared in a few lines each, and the parser of that notation.

    [database]                                      a database; EVAL lists those kept for evaluation
    table | singular/plural | rows [, dup] [, link]  a table; `dup` repeats some rows; `link` is how the first
                                                    parent of a many-to-many table relates to the second
      column kind arguments : phrase : extra        its columns, several on a line separated by `;`

Kinds: key; person, pair (a/b + c/d), list (a/b/c): unique labels; cat (a/b/c); int, real (low high step); year, date
(first last); > table: a foreign key, whose phrase reads "books <written by> Ann". `?` after a column's name makes it
NULL here and there, `~` in a name stands for a space. Phrase defaults to the name. Extra: a cat's way to filter ("from {}"),
a number's superlatives (oldest/youngest), the verb of a year or date (founded).
"""

from dataclasses import dataclass, field

EVAL = ("harbour", "garage", "theatre", "podcasts", "election", "gardens")

FIRST = "Ana/Ben/Carla/Dan/Elif/Femi/Greta/Hugo/Ines/Jonas/Kofi/Lena/Marco/Nadia/Omar/Paula/Rosa/Sven/Tara/Yusuf".split(
    "/"
)
LAST = "Abel/Brandt/Costa/Dahl/Evans/Fischer/Garcia/Haddad/Ivanov/Jensen/Kim/Lopez/Moreau/Novak/Okoye/Patel/Silva/Tanaka".split(
    "/"
)

SCHEMAS = """
[library]
author | author/authors | 12
  id key; name person; country cat Spain/Peru/Japan/Kenya/India : : from {}; born year 1931 1989 : birth year : born
book | book/books | 26
  id key; title pair Silent/Golden/Lost/Blue/Hidden/Last + River/House/Garden/Letter/Winter/Road; author_id > author : written by
  genre cat crime/poetry/history/travel; pages int 90 680 10 : number of pages; price? real 4 40 .5
loan | loan/loans | 40, dup
  book_id > book : of; day date 2021 2023 : loan date : made; days int 3 40 1 : number of days

[shop]
customer | customer/customers | 16
  id key; name person; city cat Rome/Oslo/Lima/Cairo/Dublin : : from {}; age int 18 79 1 : : oldest/youngest
product | product/products | 22
  id key; name pair Oak/Steel/Mini/Soft/Garden + Lamp/Chair/Desk/Shelf/Clock; kind cat office/home/outdoor; price real 5 240 .5 : : most expensive/cheapest
  stock int 0 90 5
sale | sale/sales | 48, dup
  customer_id > customer : to; product_id > product : of; amount int 1 9 1 : quantity; sold date 2022 2023 : sale date : made

[airline]
Airport | airport/airports | 10
  Airport_ID key; City list Lyon/Porto/Turin/Bergen/Graz/Split/Cork/Malmo/Basel/Gdansk : city name; Country cat France/Norway/Italy/Poland : : in {}; Runways int 1 6 1 : number of runways
Flight | flight/flights | 40
  Flight_ID key; Airline cat Skyjet/Norda/Alpina/Zephyr : : operated by {}; Origin > Airport : departing from; Seats int 60 320 10 : number of seats
  Distance int 180 2400 20; Price real 30 400 2.5 : : most expensive/cheapest; Day date 2023 2023 : departure date : departing

[school]
student | student/students | 18
  id key; name person; major cat Physics/Law/Art/Biology; age int 18 34 1 : : oldest/youngest; gpa? real 1 4 .25 : GPA
course | course/courses | 10
  id key; title list Algebra/Optics/Ethics/Genetics/Drawing/Statistics/Logic/Ecology/Sculpture/Geometry; credits int 2 12 1 : number of credits; room cat A1/B2/C3 : : held in room {}
enrol | enrolment/enrolments | 52, taking
  student_id > student : of; course_id > course : in; term cat spring/autumn; score? int 40 100 1

[clinic]
doctor | doctor/doctors | 9
  doctor_id key; name person; field cat surgery/skin/heart/eyes : : specialised in {}; salary int 4200 9800 100 : : best paid/worst paid
patient | patient/patients | 20
  patient_id key; name person; gender cat F/M; born date 1948 2012 : date of birth : born; city? cat Bern/Ghent/Leeds : : from {}
visit | visit/visits | 46, dup
  patient_id > patient : of; doctor_id? > doctor : with; day date 2022 2023 : visit date : made; cost real 20 300 5 : : most expensive/cheapest

[football]
club | club/clubs | 9
  club_id key; name list Rovers/United/Lions/Falcons/Harriers/Comets/Rangers/Pirates/Wolves; city cat York/Bath/Derby : : based in {}; founded year 1878 1965 : founding year : founded
player | player/players | 34
  player_id key; name person; club_id? > club : playing for; position cat keeper/defender/striker; goals int 0 38 1 : number of goals; height int 165 202 1 : : tallest/shortest
  age int 17 38 1 : : oldest/youngest

[film_archive]
director | director/directors | 10
  dir_id key; dir_name person : name; nation cat French/Danish/Korean/Mexican : nationality; born year 1930 1985 : birth year : born
movie | movie/movies | 26
  mov_id key; mov_title pair Red/Night/Second/Paper/Cold/Open + Harbor/Mirror/Summer/Train/Circle/Sky : title; dir_id > director : directed by; year year 1961 2020 : release year : released
  minutes int 70 190 1 : running time : longest/shortest; rating? real 3 10 .25
award | award/awards | 18
  mov_id > movie : won by; prize cat Jury/Acting/Sound : prize name; given year 1962 2021 : award year : given

[restaurant]
chef | chef/chefs | 8
  id key; name person; years int 1 30 1 : number of years of service; shift cat morning/evening : : on the {} shift
dish | dish/dishes | 24
  id key; name pair Spicy/Roast/Green/Sweet/Smoked + Noodles/Salad/Soup/Pie/Fish; chef_id > chef : cooked by; course cat starter/main/dessert; price real 4 32 .5 : : most expensive/cheapest
  calories? int 120 980 10 : number of calories
sale_item | order/orders | 50, dup
  dish_id > dish : of; day date 2023 2023 : order date : placed; qty int 1 6 1 : quantity

[hotels]
Hotel | hotel/hotels | 12
  Hotel_ID key; Hotel_Name pair Grand/Royal/Old/Sea + Palace/Inn/Lodge/Court : name; Town cat Nice/Faro/Bari : : in {}; Stars int 1 5 1 : number of stars; Opened year 1902 2015 : opening year : opened
Booking | booking/bookings | 48
  Booking_ID key; Hotel_ID > Hotel : at; Guest person : guest name; Nights int 1 14 1 : number of nights; Price real 50 900 5 : : most expensive/cheapest; Arrival date 2021 2023 : arrival date
  Channel? cat web/phone/agent : booking channel : made by {}

[museum]
artist | artist/artists | 11
  artist_id key; full_name person : full name; country cat Greece/Brazil/Canada/Ghana : : from {}; born year 1790 1960 : birth year : born
hall | hall/halls | 6
  hall_id key; hall_name list East/West/North/South/Round/Upper : name; floor int 1 4 1; area int 80 400 20 : : largest/smallest
work | artwork/artworks | 32
  work_id key; title pair Young/Quiet/Dark/Green/Broken/White + Sailor/Bridge/Window/Forest/Morning/Horse; artist_id > artist : made by; hall_id? > hall : shown in; type cat painting/statue/print
  made year 1820 2005 : year of creation : created; value int 5 900 5 : : most valuable/least valuable

[zoo]
keeper | keeper/keepers | 8
  id key; name person; age int 21 63 1 : : oldest/youngest; hired date 2008 2022 : hire date : hired
animal | animal/animals | 34
  id key; name pair Little/Big/Old/Brave/Lazy/Shy + Momo/Kiki/Bruno/Zaza/Tiko/Nala; species cat lion/zebra/otter/parrot; weight real 1 260 .5 : : heaviest/lightest; keeper_id? > keeper : cared for by
  born year 2002 2022 : birth year : born
feeding | feeding/feedings | 44, dup
  animal_id > animal : of; day date 2023 2023 : feeding date : done; food cat meat/fruit/hay; kilos real .5 20 .5 : amount in kilos

[bank]
branch | branch/branches | 8
  bid key; bname list Central/Harbour/Station/Airport/Market/Park/Hill/Lake : name; city cat Kiel/Bonn/Ulm : : in {}; staff int 4 60 1 : number of employees
client | client/clients | 20
  cid key; cname person : name; job cat teacher/farmer/nurse/lawyer; income int 18000 99000 500; bid > branch : served by
account | account/accounts | 40
  aid key; cid > client : held by; type cat savings/current/credit; balance real -500 9000 12.5; opened date 2010 2023 : opening date : opened

[farms]
farm | farm/farms | 11
  farm_id key; farm_name pair Oak/Fox/Mill/Stone + Hill/Field/Brook : name; region cat north/south/west : : in the {} region; hectares int 12 340 1 : area in hectares : largest/smallest
harvest | harvest/harvests | 44
  harvest_id key; farm_id > farm : from; crop cat wheat/barley/maize/beans; season year 2017 2023 : season : made; tons real 2 90 .5 : yield in tons
tractor | tractor/tractors | 18
  farm_id? > farm : owned by; brand cat Zetor/Ursus/Valtra : : of brand {}; power int 40 210 5 : : most powerful/least powerful; bought year 1995 2022 : purchase year : bought

[gym]
trainer | trainer/trainers | 8
  id key; name person; sport cat yoga/boxing/rowing; fee int 20 90 1 : hourly fee
member | member/members | 28
  id key; name person; trainer_id? > trainer : coached by; level cat basic/plus/elite; joined date 2018 2023 : joining date : who joined; weight int 48 118 1 : : heaviest/lightest
checkin | check-in/check-ins | 50, dup
  member_id > member : of; day date 2023 2023 : check-in date : made; minutes int 20 150 5 : number of minutes

[software]
team | team/teams | 7
  team_id key; title list Core/Web/Mobile/Data/Cloud/Search/Billing : name; budget int 80 900 10; office cat Paris/Turku/Delhi : : in {}
dev | developer/developers | 24
  dev_id key; name person; team_id > team : in team; lang cat Rust/Java/Python/Go : main language; salary int 2800 9200 50 : : best paid/worst paid; hired date 2012 2023 : hire date : hired
bug | bug/bugs | 46
  bug_id key; dev_id? > dev : assigned to; level cat low/medium/high : severity; hours real .5 40 .5 : number of hours; opened date 2022 2023 : opening date : opened

[music]
band | band/bands | 11
  band_id key; name pair Electric/Velvet/Iron/Paper + Owls/Rivers/Lions/Ghosts; style cat rock/jazz/folk; formed year 1964 2015 : formation year : formed; members int 2 9 1 : number of members
album | album/albums | 28
  album_id key; title pair Long/First/Neon/Slow/Wild/Empty + Roads/Nights/Echoes/Letters/Waves/Rooms; band_id > band : released by; year year 1970 2022 : release year : released; copies int 5 950 5 : number of copies sold
  length int 28 80 1 : length in minutes : longest/shortest
track | track/tracks | 44
  track_id key; album_id > album : on; seconds int 95 420 1 : number of seconds; explicit cat yes/no : explicit flag; plays? int 100 9000 100 : number of plays

[weather]
Weather Station | weather station/weather stations | 9
  Station~ID key; Station~Name list Alba/Boreal/Cirrus/Delta/Erg/Fjord/Gale/Haze/Isle : name; Country cat Chile/Nepal/Iceland : : in {}; Altitude int 5 3400 5 : : highest/lowest
Reading | reading/readings | 60, dup
  Station~ID > Weather Station : from; Day date 2022 2023 : reading date : taken; Sky cat clear/cloudy/rain : sky condition; Max~Temp? real -12 41 .5 : maximum temperature; Wind int 0 110 5 : wind speed

[rally]
Driver | driver/drivers | 16
  Driver_ID key; Driver_Name person : name; Country cat Finland/Estonia/Spain/Wales : : from {}; Age int 19 52 1 : : oldest/youngest
Race | race/races | 9
  Race_ID key; Race_Name list Snow/Desert/Forest/Coast/Volcano/Lake/Valley/Canyon/Tundra : name; Season year 2016 2023 : season : held; Length int 120 480 5 : length in kilometers : longest/shortest
Result | result/results | 56, in
  Driver_ID > Driver : of; Race_ID > Race : in; Place int 1 20 1 : finishing place; Points? int 1 25 1 : number of points; Tyres cat soft/hard/mixed : tyre type

[post_office]
Staff Member | staff member/staff members | 15
  Staff~ID key; Full~Name person; Role cat clerk/driver/manager; Start~Date date 2005 2022 : : hired; Pay int 1900 5200 50
Parcel | parcel/parcels | 46
  Parcel~No key : number; Staff~ID? > Staff Member : handled by; Zone cat local/national/abroad; Weight real .25 20 .25 : : heaviest/lightest; Sent date 2022 2023 : sending date : sent; Fee real 2 60 .5

[harbour]
port | port/ports | 9
  id key; name list Bilbao/Genoa/Varna/Izmir/Aarhus/Sines/Riga/Patras/Kotor; country cat Spain/Turkey/Latvia : : in {}; docks int 3 40 1 : number of docks
ship | ship/ships | 24
  id key; name pair Ocean/Star/Polar/Royal/Swift + Queen/Pearl/Spirit/Arrow/Trader; type cat tanker/ferry/cargo; length int 60 380 2 : : longest/shortest; built year 1975 2021 : building year : built; port_id > port : registered in
voyage | voyage/voyages | 48, dup
  ship_id > ship : of; departed date 2022 2023 : departure date; cargo? int 5 800 5 : cargo in tons; days int 1 45 1 : number of days

[garage]
mechanic | mechanic/mechanics | 8
  id key; name person; level cat junior/senior; wage int 16 48 1 : hourly wage
car | car/cars | 26
  id key; plate pair KA/LM/ZX/QR/BT + 101/237/348/512/660/795 : plate; brand cat Fiat/Volvo/Mazda/Dacia; year year 1998 2022 : model year : made; km int 5000 260000 1000 : mileage
repair | repair/repairs | 46
  id key; car_id > car : of; mechanic_id? > mechanic : done by; part cat brakes/engine/tyres/lights : repaired part; cost real 25 900 5 : : most expensive/cheapest; day date 2022 2023 : repair date : done

[theatre]
Actor | actor/actors | 14
  Actor_ID key; Name person; Country cat Ireland/Cuba/Egypt/Austria : : from {}; Age int 19 74 1 : : oldest/youngest
Play | play/plays | 10
  Play_ID key; Title list Shadows/Harvest/Tempest/Masks/Exile/Sparrow/Thirst/Lantern/Ashes/Sirens; Genre cat comedy/tragedy/musical; Year year 1948 2019 : premiere year : premiered; Seats int 90 640 10 : number of seats sold
Role | role/roles | 38, acting in
  Actor_ID > Actor : of; Play_ID > Play : in; Part cat lead/chorus/guest; Lines? int 4 220 2 : number of lines

[podcasts]
host | host/hosts | 9
  host_id key; name person; city cat Quito/Tunis/Perth : : living in {}; age int 22 66 1 : : oldest/youngest
podcast | podcast/podcasts | 16
  pod_id key; title pair Daily/Deep/Tiny/Late + Science/Stories/Money/Games/History; host_id > host : hosted by; topic cat news/tech/health; fans int 200 9800 100 : number of fans; started year 2008 2022 : starting year : started
episode | episode/episodes | 50
  ep_id key; pod_id > podcast : of; aired date 2021 2023 : air date : aired; minutes int 12 120 1 : number of minutes; score? real 1 5 .25

[election]
party | party/parties | 7
  id key; name list Greens/Liberals/Centre/Labour/Reform/Unity/Pirates; leaning cat left/right/middle : political leaning; founded year 1890 2014 : founding year : founded
candidate | candidate/candidates | 26
  id key; full~name person; party_id? > party : of; state cat Tirol/Wallis/Lazio/Alsace : : from {}; age int 24 77 1 : : oldest/youngest; votes int 300 9900 50 : number of votes
donation | donation/donations | 44, dup
  candidate_id > candidate : to; given date 2022 2023 : donation date : made; amount int 20 2500 10 : : largest/smallest

[gardens]
garden | garden/gardens | 10
  id key; name pair Rose/Palm/Fern + Court/Terrace/Meadow/Grove; city cat Kandy/Padua/Leiden : : in {}; size int 200 9000 50 : : largest/smallest; opened year 1840 2010 : opening year : opened
plant | plant/plants | 34
  id key; name pair Dwarf/Giant/Wild/Snow/Royal/Night + Orchid/Maple/Iris/Cactus/Lily/Fern; garden_id > garden : growing in; family cat tree/shrub/flower; height int 5 900 5 : : tallest/shortest; price? real 2 120 .5
gardener | gardener/gardeners | 14
  id key; name person; garden_id? > garden : working in; wage int 1500 3900 50 : : best paid/worst paid; hired date 2006 2023 : hire date : hired
"""


@dataclass
class Column:
    name: str
    kind: str
    args: str
    phrase: str
    extra: str
    nullable: bool
    values: list = field(default_factory=list)  # filled by mini_sql, in row order

    @property
    def sql(self) -> str:
        return f'"{self.name}"' if " " in self.name else self.name

    @property
    def type(self) -> str:
        return {"key": "INTEGER", ">": "INTEGER", "int": "INTEGER", "year": "INTEGER", "real": "REAL"}.get(
            self.kind, "TEXT"
        )


@dataclass
class Table:
    name: str
    one: str
    many: str
    rows: int
    duplicates: bool
    link: str
    columns: list[Column] = field(default_factory=list)

    @property
    def sql(self) -> str:
        return f'"{self.name}"' if " " in self.name else self.name

    def of(self, *kinds: str) -> list[Column]:
        return [column for column in self.columns if column.kind in kinds]

    @property
    def key(self) -> Column | None:
        return next(iter(self.of("key")), None)

    @property
    def label(self) -> Column | None:
        """The column behind the key that a row is called by: unique, never NULL."""
        return next((c for c in self.columns[1:2] if c.kind in ("person", "pair", "list") and self.key), None)

    @property
    def human(self) -> bool:
        return bool(self.label and self.label.kind == "person")


def parse(text: str = SCHEMAS) -> dict[str, list[Table]]:
    databases: dict[str, list[Table]] = {}
    for line in filter(str.strip, text.splitlines()):
        if line.startswith("["):
            tables = databases.setdefault(line.strip("[]"), [])
        elif line.startswith(" "):
            tables[-1].columns += [parse_column(item) for item in line.split(";")]
        else:
            name, nouns, rest = (part.strip() for part in line.split("|"))
            rows, *flags = (part.strip() for part in rest.split(","))
            link = "".join(flag for flag in flags if flag != "dup")
            tables.append(Table(name, *nouns.split("/"), int(rows), "dup" in flags, link))
    return databases


def parse_column(text: str) -> Column:
    head, phrase, extra = ([part.strip() for part in text.split(" :")] + ["", ""])[:3]
    name, kind, args = (head.split(" ", 2) + [""])[:3]
    plain = name.rstrip("?").replace("~", " ")
    return Column(plain, kind, args, phrase or plain.replace("_", " ").lower(), extra, name.endswith("?"))
