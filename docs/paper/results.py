"""What the recorded files say, as the page writes it. Python's standard library alone."""

import json
import math
import re
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

HERE = Path(__file__).parent


def t_point(freedom, level=0.95):
    """The two-sided point of Student's t, from Simpson's rule and bisection."""
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(math.pi * freedom)
    # With t = √freedom · tan a, the density becomes a power of cos a over a finite range.
    density = lambda angle: scale * math.sqrt(freedom) * math.cos(angle) ** (freedom - 1)

    def within(t, parts=400):
        end = math.atan(t / math.sqrt(freedom))
        weights = [1] + [4, 2] * (parts // 2 - 1) + [4, 1]
        values = (w * density(end * i / parts) for i, w in enumerate(weights))
        return 2 * sum(values) * end / parts / 3

    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < level else (low, middle)
    return low


def lines(name):
    """The records of a file, one a line."""
    text = (HERE / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


LANGUAGE = lines("language.jsonl")
TRANSLATION = lines("translation.jsonl")
SPEED = lines("speed.jsonl")


def number(value, digits=3, sign=False):
    """A number as the page writes it: a true minus, and no sign for what rounds to zero."""
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return ("−" if value < 0 else "+" if sign else "") + text


def spread(values, digits=3, sign=False):
    """Mean and range."""
    values = list(values)
    of = lambda value: number(value, digits, sign)
    if len(values) == 1:
        return of(values[0])
    return f"{of(statistics.mean(values))} ({of(min(values))} to {of(max(values))})"


def bounds(values, level=0.95):
    """The interval of the mean, 95 % if nothing else is said: Student's t over seeds."""
    half = t_point(len(values) - 1, level) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.mean(values)
    return mean - half, mean + half


def interval(values, digits=3):
    low, high = bounds(values)
    return f"{number(low, digits, True)} to {number(high, digits, True)}"


# Language models: a run is a study's, and has a name.


def runs(study, run, key="val_loss"):
    """By seed."""
    found = [r for r in LANGUAGE if (r["study"], r["run"]) == (study, run)]
    return {r["seed"]: r[key] for r in found}


def pairs(study, a, b, seeds=None, key="val_loss"):
    """The differences of two runs from the same seeds."""
    a, b = runs(study, a, key), runs(study, b, key)
    return [a[s] - b[s] for s in sorted(a.keys() & b.keys()) if seeds is None or s in seeds]


def of(study):
    """Loss and difference of a study, as the page writes them."""

    def loss(run, seeds=None, key="val_loss"):
        found = runs(study, run, key)
        return spread(v for s, v in sorted(found.items()) if seeds is None or s in seeds)

    def less(a, b, seeds=None, key="val_loss"):
        return spread(pairs(study, a, b, seeds, key), sign=True)

    return loss, less


C, CD = of("characters")
W, WD = of("words")


def perplexity(study, run):
    return spread((math.exp(v) for v in runs(study, run).values()), 1)


# Table 2's protocol at full length: a study for each normalization, with its own learning rate.

FULL = {"layer": "LN", "power": "PN", "power-v": "PN-V", "batch": "BN"}


def full(norm, key="test_loss"):
    """By seed. None of a run that diverged."""
    return runs(f"words-30-{norm}", f"{norm}-scale1", key)


def full_pairs(norm, key="test_loss"):
    """Minus LN from the same seed, of the pairs in which both runs came to their end."""
    ours, layer = full(norm, key), full("layer", key)
    both = sorted(ours.keys() & layer.keys())
    ended = [seed for seed in both if None not in (ours[seed], layer[seed])]
    return {seed: ours[seed] - layer[seed] for seed in ended}


def listed(seeds):
    return ", ".join(map(str, sorted(seeds)))


def verdict(values, paper):
    """Differences beside the paper's."""
    if len(values) < 2:
        return "one seed cannot tell"
    low, high = bounds(values)
    zero, paper_in = low <= 0 <= high, low <= paper <= high
    if zero and paper_in:
        return "cannot tell"
    if paper_in:
        return "the paper's difference"
    if zero:
        return "no difference (95 % includes 0, excludes the paper's value)"
    middle = statistics.mean(values)
    if middle * paper < 0:
        return "the opposite of the paper's order"
    return f"the paper's order, {'smaller' if abs(middle) < abs(paper) else 'larger'}"


def FULL_LOSSES():
    def row(norm, name):
        test = full(norm)
        if not test:
            return f"| {name} | | not run | | |"
        ended = {seed: loss for seed, loss in test.items() if loss is not None}
        if not ended:
            return f"| {name} | {listed(test)} | all diverged | | |"
        seeds, diverged = listed(ended), test.keys() - ended.keys()
        if diverged:
            seeds += f"; diverged: {listed(diverged)}"
        val = full(norm, "val_loss")
        return (
            f"| {name} | {seeds} | {spread(ended.values())} "
            f"| {spread((math.exp(loss) for loss in ended.values()), 2)} "
            f"| {spread(val[seed] for seed in ended)} |"
        )

    return "\n".join(row(norm, name) for norm, name in FULL.items())


def FULL_DIFFERENCES():
    def row(norm, name):
        start = f"| {name} − LN | {NATS(name)} "
        pairs = full_pairs(norm)
        if not pairs:
            return start + "| | not run | | |"
        values = list(pairs.values())
        known = interval(values) if len(values) > 1 else ""
        return (
            f"{start}| {listed(pairs)} | {spread(values, sign=True)} | {known} "
            f"| {verdict(values, predicted(name))} |"
        )

    return "\n".join(row(norm, name) for norm, name in FULL.items() if norm != "layer")


def full_summary(norm, name="PN", layer="LN"):
    """The difference with its interval in a phrase. None where nothing has run."""
    values = list(full_pairs(norm).values())
    if not values:
        return None
    text = f"{name} − {layer} is {spread(values, sign=True)} from {WORDS[len(values)]} seed"
    if len(values) > 1:
        text += f"s, 95 % {interval(values)}"
    paper = FULL[norm]
    return f"{text}, where the paper predicts {NATS(paper)}: {verdict(values, predicted(paper))}"


# The same without group scaling: PN and PN-V, which then fold away.

FREE = {"power": "PN", "power-v": "PN-V"}
RIVALS = {"rms": "RMSNorm", "dyt": "DyT", "derf": "Derf"}
FREE_RATES = ["1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2"]


def free(norm, key="test_loss"):
    """By seed."""
    return runs(f"words-30-none-{norm}", f"{norm}-noscale", key)


def free_swept(norm):
    """Losses by rate."""
    found = {rate: runs(f"sweep-none-{rate}", f"{norm}-noscale").get(10) for rate in FREE_RATES}
    return {rate: loss for rate, loss in found.items() if loss is not None}


def FREE_SWEEP_ROWS():
    def row(norm, name):
        swept = free_swept(norm)
        cells = (number(swept[rate]) if rate in swept else "–" for rate in FREE_RATES)
        return f"| {name} | " + " | ".join(cells) + " |"

    return "\n".join(row(norm, name) for norm, name in (FREE | RIVALS).items())


def FREE_BEST(norm):
    """The best rate of the sweep."""
    swept = free_swept(norm)
    return min(swept, key=swept.get)


def free_pairs(norm, key="test_loss"):
    """Minus LN from the same seed."""
    ours, layer = free(norm, key), full("layer", key)
    return {seed: ours[seed] - layer[seed] for seed in sorted(ours.keys() & layer.keys())}


def FREE_LESS(norm):
    """Minus LN, over the seeds so far."""
    less = free_pairs(norm).values()
    return f"{spread(less, sign=True)} over {WORDS[len(less)]} seed{'s' * (len(less) > 1)}"


def FREE_LOSSES():
    def row(norm, name):
        test, less = free(norm), free_pairs(norm)
        known = interval(list(less.values())) if len(less) > 1 else ""
        folded = spread(free(norm, "test_loss_folded").values()) if norm in FREE else "–"
        return (
            f"| {name} | {listed(test)} | {spread(test.values())} | {folded} "
            f"| {spread(less.values(), sign=True)} | {known} |"
        )

    return "\n".join(row(norm, name) for norm, name in (FREE | RIVALS).items() if free(norm))


def FREE_INTERVALS():
    """Whose interval holds 0, and whose does not."""

    def side(norm):
        low, high = bounds(list(free_pairs(norm).values()))
        return "includes 0" if low <= 0 <= high else "is below 0" if high < 0 else "is above 0"

    sides = {}
    for norm, name in (FREE | RIVALS).items():
        if len(free(norm)) > 1:
            sides.setdefault(side(norm), []).append(name)
    phrases = [f"{where} for {enumerated(names)}" for where, names in sides.items()]
    return f"The 95 % interval {enumerated(phrases)}."


def FREE_FOLDING():
    """What folding does to the losses, which are recorded to six digits."""
    changes = [
        abs(folded - free(norm)[seed])
        for norm in FREE
        for seed, folded in free(norm, "test_loss_folded").items()
    ]
    if max(changes) == 0:
        return "Folding leaves every loss the same to six digits."
    return f"Folding changes no loss by more than {number(max(changes), 5)}."


def FULL_LESS(a, b):
    """Over the seeds that both ran."""
    ours, theirs = full(a), full(b)
    found = [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]
    return f"{spread(found, sign=True)} over {WORDS[len(found)]} seeds"


def FULL_VERDICT():
    """For the row of the paper's long training."""
    return f"[Table 2's protocol](#table-2s-protocol-at-full-length): {full_summary('power')}"


def README_LONG():
    """The README's sentences on the long run."""
    values = list(full_pairs("power").values())
    found = verdict(values, predicted("PN"))
    starts = {
        "no": "it is level with LayerNorm",
        "cannot": "seeds cannot tell it from LayerNorm",
    }
    start = starts.get(found.split()[0].rstrip(":"), f"it shows {found}")
    return (
        f"After 30 epochs of training on words {start}: the mean difference in test loss is "
        f"{number(mean(values), sign=True)} nats per word ({WORDS[len(values)]} seeds)."
    )


# All contenders of the runs of 30 epochs.


def contenders():
    """Test loss by seed, by the contender's name. LN is what they are compared with."""
    with_groups = {name: full(norm) for norm, name in FULL.items() if norm != "layer"}
    without = {f"{name} without group scaling": free(norm) for norm, name in FREE.items()}
    return with_groups | without | {name: free(norm) for norm, name in RIVALS.items()}


def minus(a, b):
    """The differences of two contenders' runs from the same seeds."""
    both = sorted(a.keys() & b.keys())
    return {seed: a[seed] - b[seed] for seed in both if None not in (a[seed], b[seed])}


def contender_pairs():
    """Minus LN from the same seed, by name."""
    return {name: minus(losses, full("layer")) for name, losses in contenders().items()}


def BETWEEN(a, b):
    """How two contenders compare: the mean and its 95 % interval."""
    values = list(minus(contenders()[a], contenders()[b]).values())
    return f"{number(mean(values), sign=True)}, 95 % {interval(values)}"


def enumerated(names):
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def corrected():
    """Whose interval excludes 0 after Bonferroni's correction, each from its own spread, and each
    from a spread that is pooled over all."""
    found = {name: list(pairs.values()) for name, pairs in contender_pairs().items()}
    level = 1 - 0.05 / len(found)
    freedom = sum(len(values) - 1 for values in found.values())
    squares = sum((len(values) - 1) * statistics.variance(values) for values in found.values())
    pooled = t_point(freedom, level) * math.sqrt(squares / freedom)
    own = [name for name, v in found.items() if bounds(v, level)[0] * bounds(v, level)[1] > 0]
    together = [name for name, v in found.items() if abs(mean(v)) > pooled / math.sqrt(len(v))]
    return own, together, freedom


def CORRECTED():
    own, together, freedom = corrected()
    some = enumerated(own) if own else "no single difference"
    return (
        f"With Bonferroni's correction for {WORDS[len(contenders())]} comparisons {some} is "
        "significant, because three to five seeds leave little power. If all contenders are "
        "instead assumed to share one standard deviation, estimated from all of them "
        f"({freedom} degrees of freedom), those of {enumerated(together)} are. All differences "
        "share LN's runs."
    )


def FREE_SEEDS(norm, seeds):
    return spread((v for seed, v in free_pairs(norm).items() if seed in seeds), sign=True)


# LN, RMSNorm and PN with one group, again, on later builds.

ONE_BUILD = {
    "LN": ("layer-noscale", lambda: full("layer")),
    "RMSNorm": ("rms-noscale", lambda: free("rms")),
    "PN": ("power-scale1", lambda: full("power")),
}
PAIRED = [("RMSNorm", "LN"), ("PN", "LN"), ("RMSNorm", "PN")]
# The build of each run, by study and seed. What trains on from LN and RMSNorm begins with the same
# runs as this study has.
BUILDS = {
    ("words-30-one-build", 1): "a3730cf",
    ("words-30-one-build", 2): "a3730cf",
    ("words-30-one-build-2", 2): "f605221",
    ("words-30-one-build-2", 3): "f605221",
    ("words-moved-start", 1): "5a13585",
    ("words-moved-start", 2): "f605221",
    ("words-moved-start", 3): "f605221",
}
# The build on which the runs of a seed are compared.
BUILD_OF_SEED = {1: "a3730cf", 2: "f605221", 3: "f605221"}


def reruns(name):
    """By seed and build."""
    found = {}
    for (study, seed), build in BUILDS.items():
        of_study = runs(study, ONE_BUILD[name][0], "test_loss")
        if seed in of_study:
            found[seed, build] = of_study[seed]
    return dict(sorted(found.items()))


def one_build(name):
    """By seed, each on the build on which its runs are compared."""
    found = reruns(name)
    by_seed = {seed: found.get((seed, build)) for seed, build in BUILD_OF_SEED.items()}
    return {seed: loss for seed, loss in by_seed.items() if loss is not None}


def rerun_changes(name):
    """The new run's loss minus the recorded one's, by seed and build."""
    before = ONE_BUILD[name][1]()
    return {key: loss - before[key[0]] for key, loss in reruns(name).items()}


def ONE_BUILD_SEEDS():
    found = {name: one_build(name) for name in ONE_BUILD}
    if all(len(of_name) >= 3 for of_name in found.values()):
        return "All ran from seeds 1 to 3."
    has = [f"{name} from {seeds_named(of_name)}" for name, of_name in found.items() if of_name]
    return f"Of seeds 1 to 3, these runs are finished: {enumerated(has)}."


def seeds_named(seeds):
    return f"seed{'s' * (len(seeds) > 1)} {enumerated(map(str, sorted(seeds)))}"


def ONE_BUILD_CHANGES():
    def row(name, seed, build):
        old, new = ONE_BUILD[name][1]()[seed], reruns(name)[seed, build]
        change = number(new - old, sign=True)
        return f"| {name} | {seed} | {build} | {number(old)} | {number(new)} | {change} |"

    return "\n".join(row(name, *key) for name in ONE_BUILD for key in reruns(name))


def all_rerun_changes():
    return [change for name in ONE_BUILD for change in rerun_changes(name).values()]


def RERUN():
    """The largest change of a loss by running again."""
    return number(max(map(abs, all_rerun_changes())))


def ONE_BUILD_CHANGE():
    """How much a run changes, over all of them."""
    changes = all_rerun_changes()
    sizes = [abs(change) for change in changes]
    return (
        f"The change is {number(mean(sizes))} on average in absolute value over {WORDS[len(changes)]} "
        f"runs, and at most {number(max(sizes))}. The later run's loss is the higher one in "
        f"{signs(changes, +1)} cases."
    )


def ONE_BUILD_DIFFERENCES():
    def row(a, b):
        pairs = minus(one_build(a), one_build(b))
        before = minus(ONE_BUILD[a][1](), ONE_BUILD[b][1]())
        values = list(pairs.values())
        return (
            f"| {a} − {b} | {listed(pairs)} | {spread(values, sign=True)} "
            f"| {interval(values) if len(values) > 1 else 'one seed'} "
            f"| {spread((before[seed] for seed in pairs), sign=True)} |"
        )

    return "\n".join(row(*pair) for pair in PAIRED)


# Training on from the weights of LN and RMSNorm, with other normalizations in their place.

MOVED_RATES = ["4e-4", "1e-3", "2e-3"]
MOVED_FROM = {"layer": "LN", "rms": "RMSNorm"}
MOVED_TO = {
    "power-scale1": "PN, one group",
    "power-v-noscale": "PN-V, without group scaling",
}


def moved_rate(norm, run):
    """The rate with the lowest validation loss from seed 1."""
    losses = {
        rate: runs(f"words-moved-{norm}-{rate}", run).get(1) for rate in MOVED_RATES
    }
    return min((rate for rate in losses if losses[rate] is not None), key=losses.get)


def moved(norm, run, key="test_loss"):
    """By seed, at the run's rate."""
    return runs(f"words-moved-{norm}-{moved_rate(norm, run)}", run, key)


def moved_changes(norm, run):
    """Minus the control, which trains on with its own normalization, from the same seed."""
    return list(minus(moved(norm, run), moved(norm, f"{norm}-noscale")).values())


def MOVED_SEEDS():
    """The seeds that all runs have."""
    seeds = [set(moved(norm, run)) for norm in MOVED_FROM for run in (f"{norm}-noscale", *MOVED_TO)]
    found = sorted(set.intersection(*seeds))
    if len(found) == 1:
        return f"seed {found[0]}"
    return f"seeds {enumerated(map(str, found))}"


def MOVED_TABLE():
    def row(norm, run, name):
        starts = [curve[0][1] for curve in moved(norm, run, "val").values()]
        changes = moved_changes(norm, run) if run in MOVED_TO else []
        change = spread(changes, sign=True) if changes else ""
        known = interval(changes) if len(changes) > 1 else ""
        return (
            f"| {MOVED_FROM[norm]} | {name} | {moved_rate(norm, run)} | {spread(starts)} "
            f"| {spread(moved(norm, run, 'val_loss').values())} "
            f"| {spread(moved(norm, run).values())} | {change} | {known} |"
        )

    rows = []
    for norm, own in MOVED_FROM.items():
        rows.append(row(norm, f"{norm}-noscale", f"{own}, the control"))
        rows += [row(norm, run, name) for run, name in MOVED_TO.items()]
    return "\n".join(rows)


def MOVED_START(norm):
    """The test loss of the weights that runs start from."""
    return spread(runs("words-moved-start", f"{norm}-noscale", "test_loss").values())


def MOVED_FREE(norm):
    return number(mean(moved_changes(norm, "power-v-noscale")), sign=True)


def MOVED_ONE(norm):
    return number(mean(moved_changes(norm, "power-scale1")), sign=True)


def MOVED_LOWER():
    """How a still lower rate changes the controls, where it ran."""
    found = {}
    for norm, own in MOVED_FROM.items():
        run = f"{norm}-noscale"
        changes = list(minus(runs(f"words-moved-{norm}-2e-4", run, "test_loss"), moved(norm, run)).values())
        if changes:
            found[own] = spread(changes, sign=True)
    if not found:
        return "A lower one might suit them better."
    costs = enumerated(f"{change} ({own})" for own, change in found.items())
    return f"At 2e-4, tried with the controls of seed 2 alone, the test losses differ from those at 4e-4 by {costs}."


def ONE_BUILD_SHORT():
    """For the findings."""
    sizes = [abs(change) for change in all_rerun_changes()]
    text = (
        f"Repeating {WORDS[len(sizes)]} of the runs with later builds changed their losses by up to "
        f"{number(max(sizes))}"
    )
    values = list(minus(one_build("RMSNorm"), one_build("LN")).values())
    if values:
        ahead = f"{number(abs(mean(values)))} {'below' if mean(values) < 0 else 'above'} LN"
        seeds = "one seed" if len(values) == 1 else f"{WORDS[len(values)]} seeds"
        text += f", and left RMSNorm {ahead} ({seeds})"
    values = list(minus(one_build("RMSNorm"), one_build("PN")).values())
    if values:
        ahead = f"{number(abs(mean(values)))} {'below' if mean(values) < 0 else 'above'} PN"
        seeds = "one seed" if len(values) == 1 else f"{WORDS[len(values)]} seeds"
        text += f" and {ahead} ({seeds})"
    return text + "."


# Translation.


def translations(norm, groups=4, average=10, seeds=None, **others):
    """A translation by seed. Average 1 is the last weights."""
    wanted = {"parts": 1, "dropout": 0.1, "split": "test", "recalibrate": None}
    wanted |= {"own_statistics": False, "length_penalty": 1.0}
    wanted |= {"norm": norm, "groups": groups, "average": average} | others
    found = [
        r
        for r in TRANSLATION
        if r["kind"] == "translation" and all(r[key] == wanted[key] for key in wanted)
    ]
    return {r["seed"]: r for r in found if seeds is None or r["seed"] in seeds}


def own_penalty(norm):
    """The length penalty with the best BLEU on the validation split, from seed 1."""
    of = {"kind": "translation", "split": "val", "norm": norm, "seed": 1, "dropout": 0.1, "groups": 4}
    found = [r for r in TRANSLATION if all(r.get(key) == of[key] for key in of)]
    tried = {r["length_penalty"]: r["bleu"] for r in found}
    return max(tried, key=tried.get)


NAMES = {
    "layer": "LN",
    "batch": "BN",
    "power-v": "PN-V",
    "power": "PN",
    "group": "GN",
    "mabn": "MABN",
    "renorm": "BRN",
}

OWN_PENALTY = {norm: own_penalty(norm) for norm in NAMES}

HOW = {"last": {"average": 1}, "mean": {}, "own": {}}


def translated(norm, how, key, groups, seeds=None, **others):
    others = HOW[how] | others
    if how == "own":
        others["length_penalty"] = OWN_PENALTY[norm]
    found = translations(norm, groups, seeds=seeds, **others)
    return {seed: record[key] for seed, record in found.items()}


DIGITS = {"bleu": 1, "chrf": 1, "val_loss": 3, "length_ratio": 2}


def X(norm, how="mean", key="bleu", groups=4, **others):
    values = translated(norm, how, key, groups, **others)
    return spread((values[s] for s in sorted(values)), DIGITS[key])


def translated_pairs(a, b, how, key, groups, **others):
    a = translated(a, how, key, groups, **others)
    b = translated(b, how, key, groups, **others)
    return [a[s] - b[s] for s in sorted(a.keys() & b.keys())]


def XD(a, b, how="mean", key="bleu", groups=4, **others):
    return spread(translated_pairs(a, b, how, key, groups, **others), DIGITS[key], True)


def XI(a, b, how="mean", key="bleu", groups=4, **others):
    return interval(translated_pairs(a, b, how, key, groups, **others), DIGITS[key])


def training(norm, groups=4, parts=1, dropout=0.1):
    wanted = {"norm": norm, "groups": groups, "parts": parts, "dropout": dropout}
    found = [
        r
        for r in TRANSLATION
        if r["kind"] == "training" and all(r[key] == wanted[key] for key in wanted)
    ]
    return {r["seed"]: r for r in found}


def observed(norm, quantity, what):
    """Over seeds: the mean, or of what is largest the largest."""
    found = [r["observed"][quantity][what] for r in training(norm).values()]
    return max(found) if what == "largest" else statistics.mean(found)


# Reports, which have what the one line of a run has not.


def cell(study, section, row, column, which=0):
    """A cell of a report's table: by section, by how its row starts, and by its column's name, in
    the section's `which`-th table that has this row and this column."""
    text = (HERE / study / "report.md").read_text()
    [part] = [p for p in text.split("\n## ") if p.startswith(section + "\n")]
    found, head = [], None
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells
        elif cells[: len(row)] == list(row) and column in head:
            found.append(cells[head.index(column)])
    return found[which].replace("-", "−")


def rounded(text, digits):
    """A report's cell with fewer digits."""
    places = Decimal(1).scaleb(-digits)
    of = lambda match: str(Decimal(match[0]).quantize(places, ROUND_HALF_UP))
    return re.sub(r"\d+\.\d+", of, text)


# What single places of the page say.

mean = statistics.mean

# Test perplexities on PTB and WikiText-103 (the paper's Tables 2 and 3).
PAPER = {"LN": (53.2, 20.9), "BN": (60.7, 27.2), "PN-V": (55.3, 21.3), "PN": (47.6, 17.9)}

WORDS = "none one two three four five six seven eight nine ten eleven twelve".split()


def PPL(norm):
    return " and ".join(str(value) for value in PAPER[norm])


def GAP(above, below):
    """How far a normalization of the paper is above another, on both texts."""
    return " and ".join(f"{a - b:.1f}" for a, b in zip(PAPER[above], PAPER[below]))


def predicted(norm):
    """The paper's Table 2 of a normalization minus LN, on PTB, in nats."""
    return math.log(PAPER[norm][0] / PAPER["LN"][0])


def NATS(norm):
    return number(predicted(norm), 2, True)


def signs(values, sign):
    """In how many pairs the difference has this sign."""
    return f"{WORDS[sum(v * sign > 0 for v in values)]} of {WORDS[len(values)]}"


def SIGNS(study, a, b, sign):
    return signs(pairs(study, a, b), sign)


def SIGNS_X(a, b, sign, how="mean", key="val_loss", groups=4):
    return signs(translated_pairs(a, b, how, key, groups), sign)


def LEAD(study, a, b):
    """How far the mean of `a` is below that of `b`."""
    return number(-mean(pairs(study, a, b)))


def EPOCHS(study, steps):
    """The passes over the text that `steps` steps of 768 tokens make."""
    text = (HERE / study / "report.md").read_text()
    return number(768 * steps / int(text.split()[1]), 2)


def OTHER_PENALTIES():
    others = {OWN_PENALTY[norm] for norm in NAMES if norm not in ("batch", "renorm")}
    if len(others) > 1:
        raise ValueError(f"several: {others}")
    return others.pop()


def BELOW(study, a, b):
    """How far `a` is below `b`: "0.009 (0.007 to 0.011)"."""
    return spread(-v for v in pairs(study, a, b))


def ABOVE(study, a, b):
    return spread(pairs(study, a, b))


def ORDER(study):
    """All normalizations behind four groups, from the highest loss to the lowest."""
    means = [(mean(runs(study, run).values()), name) for run, name in NAMES.items()]
    return ", ".join(f"{name} {number(value)}" for value, name in sorted(means, reverse=True))


def long_run(study, run):
    [loss] = runs(study, run).values()
    return f"{number(loss)} (perplexity {number(math.exp(loss), 1)})"


def W30(run):
    return long_run("words-30", run)


def W10(run, name):
    return f"{name} {long_run('words-10', run)}"


def SWEEP_TEXT():
    """What the sweep says so far."""
    ln, pn = sweep("layer-scale1"), sweep("power-scale1")
    best = ", ".join(
        f"{name} {number(sweep(run)[sweep_best(run)] - ln[sweep_best('layer-scale1')], sign=True)}"
        for run, name in SWEPT.items()
        if name != "LN"
    )
    gaps = [pn[rate] - ln[rate] for rate in RATES[:4] if rate in pn and rate in ln]
    text = (
        f"The best rates are: {best_rates()}. Minus LN, each at its best: {best}. At equal rates PN − "
        f"LN ranges from {number(min(gaps), sign=True)} to {number(max(gaps), sign=True)}, so "
        "one seed cannot rank them."
    )
    costs = ", ".join(
        f"{name} {number(without_warmup(run), sign=True)}"
        for run, name in SWEPT.items()
        if {"2e-3", "2e-3-none"} <= sweep(run).keys()
    )
    text += f" Without a warm-up of the rate the loss changes by: {costs}. The warm-up of ψ² is kept in these runs."
    return text + more_seeds()


def more_seeds():
    return f" At 4e-3, PN − LN is {AT_BEST()} (from 10 on), 95 % {interval(at_best())}."


def at_best():
    """PN − LN at the rate that is best for both, from all seeds that ran."""
    return pairs("sweep-4e-3", "power-scale1", "layer-scale1")


def AT_BEST():
    found = at_best()
    return f"{spread(found, sign=True)} over {WORDS[len(found)]} seeds"


def without_warmup(run):
    losses = sweep(run)
    return losses["2e-3-none"] - losses["2e-3"]


def WITHOUT_WARMUP(run):
    return number(without_warmup(run))


def best_rates():
    whole = [run for run in SWEPT if set(RATES[:4]) <= sweep(run).keys()]
    best = {SWEPT[run]: sweep_best(run) for run in whole}
    return ", ".join(f"{name} {rate}" for name, rate in best.items())


def SWEEP_SHORT():
    """The sweep in a sentence."""
    return (
        f"In a sweep of two epochs of words the best rates are: {best_rates()}. At 4e-3 PN − LN "
        f"is {AT_BEST()}, and the 95 % interval of that is {interval(at_best())}."
    )


SWEPT = {"layer-scale1": "LN", "power-scale1": "PN", "batch-scale1": "BN", "power-v-scale1": "PN-V"}
RATES = ["1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2", "2e-3-none"]


def sweep(run):
    """The losses that are on record, by rate."""
    found = {rate: runs(f"sweep-{rate}", run) for rate in RATES}
    return {rate: losses[10] for rate, losses in found.items() if 10 in losses}


def sweep_best(run):
    losses = {rate: loss for rate, loss in sweep(run).items() if rate != "2e-3-none"}
    return min(losses, key=losses.get)


def SWEEP_ROWS():
    def row(run, name):
        losses = sweep(run)
        cells = [number(losses[rate]) if rate in losses else "" for rate in RATES]
        return f"| {name} | {' | '.join(cells)} |"

    return "\n".join(row(run, name) for run, name in SWEPT.items())


def LENGTH_R(how):
    """How BLEU goes with length over the runs of a kind, instance normalization left out."""
    average = {"last": 1, "mean": 10}[how]
    found = [
        r
        for r in TRANSLATION
        if r["kind"] == "translation"
        and (r["split"], r["length_penalty"], r["dropout"]) == ("test", 1.0, 0.1)
        and r["average"] == average
        and not r["recalibrate"]
        and not r["own_statistics"]
        and not r["norm"].startswith("instance")
    ]
    lengths, bleu = [r["length_ratio"] for r in found], [r["bleu"] for r in found]
    return number(statistics.correlation(lengths, bleu), 1)


def AVERAGING(norm):
    """What the mean of ten weights does to BLEU."""
    last, averaged = translations(norm, average=1), translations(norm)
    return spread((averaged[s]["bleu"] - last[s]["bleu"] for s in last), 1, True)


def recalibrated(norm, key):
    again = [
        r
        for r in TRANSLATION
        if r["kind"] == "translation" and r["norm"] == norm and r["recalibrate"]
    ]
    others = ["norm", "groups", "parts", "dropout", "split", "average", "seed", "length_penalty"]

    def before(record):
        return next(
            r[key]
            for r in TRANSLATION
            if r["kind"] == "translation"
            and not r["recalibrate"]
            and not r["own_statistics"]
            and all(r[name] == record[name] for name in others)
        )

    return [record[key] - before(record) for record in again]


def RECALIBRATED(norm):
    changes = recalibrated(norm, "bleu")
    return f"{number(min(changes), 3, True)} to {number(max(changes), 3, True)}"


def RECALIBRATED_LOSS():
    changes = recalibrated("power", "val_loss") + recalibrated("power-v", "val_loss")
    return number(math.ceil(1000 * max(map(abs, changes))) / 1000)


def X0(norm):
    """Without dropout: BLEU and loss of the mean weights."""
    [record] = translations(norm, dropout=0.0).values()
    return f"{number(record['bleu'], 1)} and {number(record['val_loss'])}"


def X0D(a, b):
    return XD(a, b, dropout=0.0)


def X1(norm):
    """From seed 1: BLEU and loss of the mean weights."""
    record = translations(norm)[1]
    return f"{number(record['bleu'], 1)} ({number(record['val_loss'])})"


def PARTS(norm, key):
    """From seed 1, by an eighth, a quarter, a half and all of a step's tokens."""
    counts = [1] if norm == "layer" else [8, 4, 2, 1]
    found = [translations(norm, parts=parts)[1][key] for parts in counts]
    return ", ".join(number(value, DIGITS[key]) for value in found)


def MEMORY(norm):
    found = [r["peak_memory_bytes"] / 2**20 for r in training(norm).values()]
    return f"{min(found):.0f} to {max(found):.0f}"


[PADDING] = [r for r in SPEED if r["kind"] == "padding"]


def TURNS(norm):
    """A step's time over LN's, in each run."""
    times = {(r["run"], r["norm"]): r["ms_per_step"] for r in SPEED if r["kind"] == "training"}
    found = sorted({run for run, _ in times})
    return " and ".join(f"{times[run, norm] / times[run, 'layer']:.2f}" for run in found)


def FOLDED(groups):
    found = [r for r in SPEED if r["kind"] == "fold" and r["groups"] == groups]
    if any(r["sample_differs_from"] is not None for r in found):
        raise ValueError("a folded sample differs")
    ratios = [f"{r['tokens_per_second'] / r['tokens_per_second_unfolded']:.2f}" for r in found]
    return ", ".join(ratios[:-1]) + " and " + ratios[-1]


def scientific(value):
    """0.0621, or 4.67e−8 where that would be long."""
    if value > 1e-3:
        return f"{value:.4f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e−{-int(exponent)}"


def OBSERVED(norm, quantity, what):
    value = observed(norm, quantity, what)
    return scientific(value) if what == "median" else f"{value:.2f}"


def OUTLIER(study, quantity, norm, column, digits=2):
    section = (HERE / study / "report.md").read_text()
    [line] = [l for l in section.splitlines() if l.startswith(f"| {quantity} | {norm} |")]
    heads = ["median", "99th percentile, over it", "largest, over it", "last quarter over first"]
    value = float(line.strip("| ").split(" | ")[2 + heads.index(column)])
    return scientific(value) if column == "median" else f"{value:.{digits}f}"


def OUTLIER_LIMIT(study):
    """What no distance's largest over the median comes to, to a tenth."""
    text = (HERE / study / "report.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| relative distance of ")]
    return number(math.ceil(10 * max(float(row.split(" | ")[4]) for row in rows)) / 10, 1)


def MISSED(which):
    """The square of the distance of means, in per cent."""
    quantity = "relative distance of the mean"
    medians = {
        "X": observed("batch", quantity, "median"),
        "S": float(OUTLIER("characters", quantity, "BN", "median")),
    }
    return number(100 * medians[which] ** 2, 1)


def SINGULAR(norm):
    return spread((r["singular_largest_over_median"] for r in training(norm).values()), 2)


def within(norm):
    found = [r["within"] for r in training(norm).values()]
    return {layer: mean(r[layer] for r in found) for layer in found[0]}


def WITHIN(norm):
    shares = [f"{value:.2f}" for value in within(norm).values()]
    return ", ".join(shares[:-1]) + " and " + shares[-1]


def OUTSIDE(norm):
    return f"{100 - 100 * mean(within(norm).values()):.0f}"


def SHARE(layer):
    """The same in language models, of PN-V."""
    return f"{float(cell('characters', 'γ/ψ', (layer,), 'power-v', 2).split()[0]):.2f}"


def ASSUMPTION(which, scale):
    """The channels and steps outside Assumption 10, and all."""
    row = ("paper", scale, "on")
    some_of_all = cell("characters", "Recipes", row, "outside Assumption 10").split()
    return f"{int(some_of_all[2 * which]):,}"


def GUARDED():
    row = ("paper", "off", "on")
    some, all_ = cell("characters", "Recipes", row, "outside Assumption 10").split(" of ")
    return number(100 * int(some) / int(all_), 1)


def ROWS64(norm, table, digits):
    section = "Rows that statistics are taken over"
    # The cell is empty in the second table where there is nothing to compare.
    return rounded(cell("characters", section, ("64",), norm, table).split()[0], digits)


def LOWEST_TRAINING():
    """The least loss of a run's last steps, one-sequence batches of BN and PN-V aside."""
    section = "Rows that statistics are taken over"
    cells = [
        cell("characters", section, (rows,), norm, 2)
        for norm in ("batch", "power-v", "power")
        for rows in ("64", "192", "384", "768")
        if norm == "power" or rows != "64"
    ]
    cells.append(cell("characters", "Recipes", ("PN-V", "off", "has none"), "training"))
    least = min(float(re.search(r"\((\S+) to", cell)[1]) for cell in cells)
    return number(math.floor(100 * least) / 100, 2)


def alphas(run):
    """Losses of seed 1 by pair of α, from the lowest."""
    pairs_ = [(f, b) for f in ("0.9", "0.95", "0.99") for b in ("0.9", "0.95", "0.99")]
    name = lambda f, b: run + ("" if f == b == "0.9" else f"-alpha{f}-{b}")
    return {(f, b): runs("characters", name(f, b))[1] for f, b in pairs_}


def ALPHA(run, place):
    """How far the best pair is below the one in this place of their order."""
    losses = sorted(alphas(run).values())
    return number(losses[place] - losses[0])


def ALPHA_BACKWARD():
    """What 0.99 in the backward costs without group scaling, against 0.9."""
    losses = alphas("power-noscale")
    costs = [losses[f, "0.99"] - losses[f, "0.9"] for f in ("0.9", "0.95", "0.99")]
    return f"{number(min(costs), 2)} to {number(max(costs), 2)}"


def own(dropout, own_statistics, key):
    seeds = (1, 2, 3)
    found = translations(
        "batch", average=1, seeds=seeds, dropout=dropout, own_statistics=own_statistics
    )
    return {seed: r[key] for seed, r in found.items()}


def OWN(dropout, own_statistics, key):
    return spread(own(dropout, own_statistics, key).values(), DIGITS[key])


def OWN_LESS(dropout, sign=1):
    """How far the batch's statistics lower BN's loss."""
    running, batch = (own(dropout, which, "val_loss") for which in (False, True))
    return number(sign * mean(running[s] - batch[s] for s in running))
