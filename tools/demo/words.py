"""The knowledge of the demo models: every list and table that the generator draws from."""


def words(text: str) -> list[str]:
    """A list written as words."""
    return text.split()


def phrases(text: str) -> list[str]:
    """A list written with bars between."""
    return text.split("|")


def table(text: str) -> dict[str, str]:
    """A table written as key:value."""
    return {key: value for key, value in (pair.split(":") for pair in text.split())}


NAMES = words(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor Zoe "
    "Alice Bob Carl Dora Eric Frida George Hanna Ivan Julia Karl Lucy Max Nina Oscar Peter Ruth Simon Tom Ursula Vera "
    "Walter Adam Bella Chris Diana Elsa Fred Greta Hugo Iris John Laura Mark Nora Otto Rita Sara Theo Maria James Lily"
)
PET_NAMES = words("Rex Bella Max Luna Spot Coco Milo Daisy Rocky Toby Ruby Oscar Pip Biscuit Shadow Lucky")
ONSETS = words("b d f g h j k l m n p r s t v w z br dr tr st sh ch kr")
VOWELS = words("a e i o u")

CAPITALS = table(
    "France:Paris Italy:Rome Spain:Madrid Germany:Berlin England:London Portugal:Lisbon Greece:Athens Austria:Vienna "
    "Poland:Warsaw Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin Japan:Tokyo "
    "China:Beijing Egypt:Cairo Russia:Moscow Hungary:Budapest Belgium:Brussels Cuba:Havana Kenya:Nairobi Peru:Lima "
    "Canada:Ottawa"
)
CITIES = [*CAPITALS.values(), "Boston", "Hamburg", "Milan", "Sydney", "Chicago", "Venice"]
STRANGE_PLACES = words("Zambia Iceland Brazil India Chile Nepal Texas Atlantis Narnia Mexico Korea Turkey Bolivia Fiji")

OPPOSITES = table(
    "hot:cold big:small tall:short fast:slow happy:sad light:dark old:young rich:poor hard:soft wet:dry full:empty "
    "open:closed up:down left:right early:late strong:weak clean:dirty loud:quiet near:far high:low long:brief "
    "thick:thin heavy:weightless day:night good:bad true:false win:lose push:pull buy:sell love:hate begin:end "
    "inside:outside first:last easy:difficult brave:afraid sweet:sour wide:narrow deep:shallow above:below "
    "always:never give:take laugh:cry summer:winter black:white cheap:expensive sharp:blunt remember:forget"
)
OPPOSITES |= {b: a for a, b in OPPOSITES.items()}

COLOURS = words("red blue green yellow orange purple pink brown black white grey")
COLOUR_OF = table(
    "banana:yellow lemon:yellow tomato:red strawberry:red cherry:red frog:green carrot:orange "
    "pumpkin:orange plum:purple flamingo:pink pig:pink bear:brown potato:brown raven:black crow:black swan:white "
    "elephant:grey mouse:grey cucumber:green pea:green canary:yellow firetruck:red lime:green snowman:white"
)
COLOUR_OF_THE = table("sky:blue sea:blue grass:green snow:white sun:yellow night:black blood:red milk:white")

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")

SOUNDS = table(
    "dog:woof cat:meow cow:moo sheep:baa duck:quack pig:oink horse:neigh lion:roar owl:hoot bee:buzz snake:hiss "
    "mouse:squeak wolf:howl frog:croak donkey:bray crow:caw"
)
YOUNG = table(
    "dog:puppy cat:kitten cow:calf sheep:lamb duck:duckling pig:piglet horse:foal lion:cub hen:chick goat:kid "
    "swan:cygnet kangaroo:joey frog:tadpole owl:owlet deer:fawn"
)
LEGS = {animal: 4 for animal in words("dog cat cow sheep pig horse lion mouse wolf fox bear frog goat")}
LEGS |= {animal: 2 for animal in words("duck owl hen crow swan eagle person")}
LEGS |= {animal: 6 for animal in words("bee ant beetle butterfly")} | {"spider": 8, "snake": 0, "fish": 0}
HOMES = {
    "bird": "in a nest", "bee": "in a hive", "spider": "in a web", "fish": "in the water", "rabbit": "in a burrow",
    "bear": "in a cave", "horse": "in a stable", "dog": "in a kennel", "pig": "in a sty", "camel": "in the desert",
    "monkey": "in the jungle", "whale": "in the sea",
}  # fmt: skip
HOME_NOUNS = [home.split()[-1] for home in HOMES.values()]

KINDS = {
    "fruit": words("apple pear plum cherry banana grape lemon orange peach melon mango"),
    "vegetable": words("carrot potato pea onion cabbage leek bean cucumber pumpkin spinach"),
    "animal": words("dog cat horse cow lion bear wolf fox rabbit sheep goat mouse"),
    "bird": words("owl eagle duck swan crow robin hen parrot sparrow"),
    "tool": words("hammer saw spade rake drill ladder axe wrench"),
    "drink": words("tea coffee milk water juice cocoa lemonade"),
    "sport": words("tennis football hockey golf rugby chess swimming rowing"),
    "instrument": words("piano violin flute drum guitar trumpet harp cello"),
    "tree": words("oak pine birch maple willow beech hazel ash"),
    "vehicle": words("car bus train bicycle boat plane truck tram"),
}
MASS = {*KINDS["drink"], *KINDS["sport"], "spinach", "cabbage"}  # without an article
FOODS = words("pizza soup bread cheese rice cake pasta salad honey chocolate apples pancakes noodles porridge")
HOBBIES = words("swim read paint dance sing cook draw run climb fish knit sail")
PETS = words("dog cat rabbit parrot hamster pony goldfish turtle")

STORY_PEOPLE = words("king queen robot dragon pirate wizard girl boy baker farmer knight sailor witch giant princess")
STORY_ANIMALS = words("fox cat dog mouse bear owl rabbit wolf duck frog horse hedgehog squirrel lion turtle goat")
THINGS = words(
    "teapot cloud train lamp shoe tree star boat bridge clock hat book spoon river mountain castle garden kite kettle "
    "snowflake button candle mirror moon stone apple pumpkin guitar car"
)
TRAITS = words("little brave clever shy hungry curious kind lazy happy merry sleepy proud")
STRANGE = words(  # nouns that questions outside the demo's knowledge are about
    "volcano engine quantum bitcoin inflation gravity electron algorithm galaxy philosophy parliament economy vaccine "
    "protein satellite dinosaur pyramid tax novel opera election magnet enzyme compiler database server laptop phone "
    "kernel tensor matrix theorem war treaty empire senate planet comet battery laser fusion virus insurance mortgage "
    "recipe symphony website president minister actor singer movie film team league"
)
STRANGE_VERBS = words("fix build install write sell design repair translate compute prove program explain cook paint")
LANGUAGES = words("French German Spanish Latin Chinese Japanese Greek Russian")
PHRASES = phrases(  # to be repeated
    "the red fox runs|a cold morning|two green apples|I like the sea|every day is new|the moon is bright|open the door|"
    "never give up|the old oak tree|bread and butter|seven little ducks|a warm cup of tea|the king is asleep|"
    "we are friends|snow on the hills|a bird in the tree"
)
