"""The domains of the generated tasks: tables, columns and the values that fill them.

Train and holdout domains share no table name, no column name and no value of a category. Every child table
points to one parent table through a column of the same name, which is the parent's first column.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Number:
    low: int
    """Smallest value."""
    high: int
    """Largest value."""
    step: int = 1
    """All values are `low` plus a multiple of this."""


@dataclass(frozen=True)
class Table:
    name: str
    """Plural noun, as it stands in questions."""
    label: str
    """The first column: names the row, unique in the table."""
    labels: str
    """Names that rows are given, separated by commas."""
    categories: dict[str, str]
    """Column -> its possible values, separated by commas; never NULL."""
    numbers: dict[str, Number]
    """Column -> its range; never NULL, no value twice in a table, so the largest is always one row."""
    optional: dict[str, Number] = field(default_factory=dict)
    """Numeric columns of which about a quarter is NULL."""
    parent: str | None = None
    """Name of the table whose label this one refers to."""


@dataclass(frozen=True)
class Schema:
    name: str
    """The task's domain."""
    is_holdout: bool
    """Whether its tasks are kept for the holdout."""
    tables: tuple[Table, ...]
    """Parents after their children."""


PEOPLE = "Ada,Ben,Cora,Dan,Eva,Finn,Gus,Hana,Ivo,Jane,Karl,Lena,Max,Nora,Omar,Paul,Rita,Sam,Tina,Vera"
OTHER_PEOPLE = "Alma,Boris,Clara,Dirk,Elsa,Felix,Greta,Hugo,Irma,Jonas,Klara,Leon,Mira,Nils,Olga,Peer,Rosa,Sven,Thea"

_TRAIN = (
    Schema(
        "library",
        False,
        (
            Table(
                "books",
                "title",
                "Dust,Ember,Frost,Glass,Harbor,Iron,Jade,Lantern,Mirror,Night,Orchid,Rain,Salt,Thorn,Wolf",
                {"genre": "crime,poetry,travel,horror,romance,satire"},
                {"pages": Number(90, 900, 10)},
                {"price": Number(5, 60)},
                parent="authors",
            ),
            Table(
                "authors",
                "author",
                PEOPLE,
                {"country": "Spain,Japan,Peru,Kenya,Norway"},
                {"born": Number(1900, 1999)},
            ),
        ),
    ),
    Schema(
        "zoo",
        False,
        (
            Table(
                "animals",
                "animal",
                "Baloo,Coco,Dodo,Echo,Fifi,Gogo,Kiki,Lulu,Momo,Nemo,Pipa,Rex,Simba,Toto,Zaza",
                {"species": "lion,zebra,otter,panda,camel,tiger"},
                {"weight": Number(10, 600, 5)},
                {"age": Number(1, 40)},
                parent="keepers",
            ),
            Table(
                "keepers",
                "keeper",
                PEOPLE,
                {"section": "north,south,east,west"},
                {"salary": Number(1000, 4000, 50)},
            ),
        ),
    ),
    Schema(
        "school",
        False,
        (
            Table(
                "students",
                "student",
                PEOPLE,
                {"grade": "first,second,third,fourth"},
                {"score": Number(20, 99)},
                {"height": Number(120, 190)},
                parent="clubs",
            ),
            Table(
                "clubs",
                "club",
                "chess,drama,robotics,choir,debate,garden,yoga",
                {"room": "hall,attic,gym,lab"},
                {"fee": Number(5, 90)},
            ),
            Table(
                "exams",
                "exam",
                "algebra,biology,latin,physics,history,music,logic,optics,sports",
                {"weekday": "Monday,Tuesday,Friday,Sunday"},
                {"minutes": Number(30, 240, 5)},
            ),
        ),
    ),
    Schema(
        "airport",
        False,
        (
            Table(
                "flights",
                "flight",
                "F10,F12,F15,F18,F21,F24,F27,F30,F33,F36,F39,F42,F45,F48,F51",
                {"destination": "Paris,Cairo,Lima,Tokyo,Oslo,Quito"},
                {"distance": Number(200, 9000, 100)},
                {"delay": Number(1, 120)},
                parent="airlines",
            ),
            Table(
                "airlines",
                "airline",
                "Aero,Blue,Cloud,Delta,Eagle,Falcon,Globe,Swift",
                {"alliance": "star,sky,one,none"},
                {"fleet": Number(10, 300, 5)},
            ),
        ),
    ),
    Schema(
        "cinema",
        False,
        (
            Table(
                "films",
                "film",
                "Apollo,Bridge,Canyon,Desert,Eclipse,Fever,Ghost,Island,Jungle,Legend,Maze,Oasis,Pearl",
                {"style": "comedy,drama,western,thriller,musical"},
                {"runtime": Number(60, 220, 2)},
                {"stars": Number(1, 30)},
                parent="directors",
            ),
            Table(
                "directors",
                "director",
                PEOPLE,
                {"nation": "Italy,India,Chile,Egypt,Canada"},
                {"awards": Number(0, 40)},
            ),
            Table(
                "screens",
                "screen",
                "alpha,beta,gamma,delta,kappa,omega,sigma,zeta",
                {"floor": "lower,middle,upper"},
                {"seats": Number(40, 500, 10)},
            ),
        ),
    ),
    Schema(
        "kitchen",
        False,
        (
            Table(
                "dishes",
                "dish",
                "borscht,curry,falafel,gumbo,hummus,lasagna,moussaka,paella,ramen,risotto,sushi,tacos",
                {"course": "starter,main,dessert,snack"},
                {"calories": Number(80, 1500, 10)},
                {"spice": Number(1, 30)},
                parent="chefs",
            ),
            Table(
                "chefs",
                "chef",
                PEOPLE,
                {"city": "Lyon,Milan,Osaka,Boston,Delhi"},
                {"experience": Number(1, 45)},
            ),
        ),
    ),
    Schema(
        "hospital",
        False,
        (
            Table(
                "patients",
                "patient",
                PEOPLE,
                {"ward": "heart,brain,skin,bone,eye"},
                {"weeks": Number(1, 60)},
                {"temperature": Number(35, 60)},
                parent="doctors",
            ),
            Table(
                "doctors",
                "doctor",
                "Dr Ash,Dr Birch,Dr Cedar,Dr Elm,Dr Fir,Dr Hazel,Dr Oak,Dr Pine",
                {"shift": "morning,evening,overnight"},
                {"operations": Number(5, 400, 5)},
            ),
            Table(
                "drugs",
                "drug",
                "aloxin,benzol,cardin,dormal,epilan,fluxin,gastral,hepanol,juvamin",
                {"form": "pill,syrup,cream,drops"},
                {"dose": Number(5, 500, 5)},
            ),
        ),
    ),
    Schema(
        "league",
        False,
        (
            Table(
                "players",
                "player",
                PEOPLE,
                {"position": "goalie,defender,midfielder,striker"},
                {"goals": Number(0, 60)},
                {"injuries": Number(1, 30)},
                parent="teams",
            ),
            Table(
                "teams",
                "team",
                "Bears,Comets,Dragons,Hawks,Lions,Rockets,Sharks,Titans",
                {"division": "premier,national,regional"},
                {"titles": Number(0, 30)},
            ),
        ),
    ),
    Schema(
        "garage",
        False,
        (
            Table(
                "cars",
                "plate",
                "AB1,CD2,EF3,GH4,JK5,LM6,NP7,QR8,ST9,UV1,WX2,YZ3,BA4,DC5",
                {"color": "red,green,black,white,silver"},
                {"mileage": Number(1000, 200000, 1000)},
                {"repairs": Number(1, 40)},
                parent="brands",
            ),
            Table(
                "brands",
                "brand",
                "Astra,Bolt,Cobra,Duster,Fiesta,Nova,Polo",
                {"fuel": "petrol,diesel,electric,gas"},
                {"founded": Number(1890, 2010)},
            ),
        ),
    ),
    Schema(
        "radio",
        False,
        (
            Table(
                "songs",
                "song",
                "Arrow,Breeze,Candle,Dawn,Echoes,Flame,Gravity,Hollow,Indigo,Jupiter,Karma,Lotus,Mosaic",
                {"mood": "happy,sad,calm,wild,dreamy"},
                {"seconds": Number(90, 600, 5)},
                {"plays": Number(10, 900, 10)},
                parent="bands",
            ),
            Table(
                "bands",
                "band",
                "Atlas,Bandits,Circus,Druids,Foxes,Nomads,Pirates,Vikings",
                {"language": "English,French,German,Arabic"},
                {"members": Number(2, 40)},
            ),
            Table("hosts", "host", PEOPLE, {"slot": "dawn,noon,dusk"}, {"listeners": Number(100, 9000, 100)}),
        ),
    ),
)

_HOLDOUT = (
    Schema(
        "shop",
        True,
        (
            Table(
                "products",
                "product",
                "anvil,basket,compass,drill,easel,funnel,globe,hammer,jar,kettle,ladder,mop,nail",
                {"material": "wood,steel,glass,paper,wool"},
                {"stock": Number(5, 400, 5)},
                {"discount": Number(1, 60)},
                parent="suppliers",
            ),
            Table(
                "suppliers",
                "supplier",
                "Acme,Bravo,Corex,Dynamo,Ergon,Fortis,Globex,Helix",
                {"region": "Alps,Coast,Plains,Delta"},
                {"rating": Number(1, 99)},
            ),
        ),
    ),
    Schema(
        "orchard",
        True,
        (
            Table(
                "trees",
                "tree",
                "T01,T02,T03,T04,T05,T06,T07,T08,T09,T10,T11,T12,T13,T14,T15",
                {"fruit": "apple,cherry,plum,lemon,quince"},
                {"yield": Number(10, 300, 2)},
                {"rings": Number(3, 90)},
                parent="fields",
            ),
            Table(
                "fields",
                "field",
                "Acorn,Brook,Clover,Daisy,Fern,Heath,Ivy,Meadow",
                {"soil": "clay,sand,peat,chalk"},
                {"acres": Number(2, 200, 2)},
            ),
            Table(
                "tractors",
                "tractor",
                "Atom,Bison,Crane,Digger,Goliath,Hercules,Mammoth",
                {"engine": "small,medium,large"},
                {"hours": Number(100, 9000, 100)},
            ),
        ),
    ),
    Schema(
        "museum",
        True,
        (
            Table(
                "paintings",
                "painting",
                "Abyss,Bloom,Chaos,Dancer,Empress,Fable,Grace,Hermit,Idyll,Joy,Moon,Poet,Sailor",
                {"technique": "oil,ink,chalk,tempera,collage"},
                {"width": Number(20, 400, 5)},
                {"visitors": Number(50, 5000, 50)},
                parent="painters",
            ),
            Table(
                "painters",
                "painter",
                OTHER_PEOPLE,
                {"period": "baroque,gothic,modern,rococo"},
                {"prizes": Number(0, 50)},
            ),
        ),
    ),
    Schema(
        "company",
        True,
        (
            Table(
                "employees",
                "employee",
                OTHER_PEOPLE,
                {"role": "analyst,clerk,engineer,lawyer,manager"},
                {"wage": Number(900, 9000, 100)},
                {"bonus": Number(10, 900, 10)},
                parent="departments",
            ),
            Table(
                "departments",
                "department",
                "sales,legal,design,research,support,finance,audit,press",
                {"building": "tower,annex,villa,campus"},
                {"budget": Number(10, 900, 10)},
            ),
            Table(
                "vans",
                "van",
                "V1,V2,V3,V4,V5,V6,V7,V8,V9",
                {"depot": "harbor,station,market"},
                {"load": Number(100, 3000, 50)},
            ),
        ),
    ),
    Schema(
        "space",
        True,
        (
            Table(
                "missions",
                "mission",
                "Aurora,Borealis,Cassini,Draco,Equinox,Fornax,Gemini,Horizon,Icarus,Juno,Kepler,Lyra",
                {"target": "Mars,Venus,Saturn,Ceres,Titan"},
                {"days": Number(20, 900, 10)},
                {"crew": Number(1, 30)},
                parent="rockets",
            ),
            Table(
                "rockets",
                "rocket",
                "Ariel,Boreas,Castor,Hermes,Orion,Pegasus,Vega",
                {"maker": "Nordic,Pacific,Sahara,Boreal"},
                {"thrust": Number(100, 5000, 50)},
            ),
        ),
    ),
)

SCHEMAS = _TRAIN + _HOLDOUT
