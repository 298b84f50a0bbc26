"""Puts the finished runs of folders of `lab study` on record, in language.jsonl.

    python3 docs/paper/record.py STUDY FOLDER...

STUDY is the name of the runs' study. Its settings, those that all its runs share, are in
studies.json. A run with other settings is rejected, and so is another result of a run that is on
record. Unfinished runs are listed.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent

# What runs of one study may differ in: their names tell these.
OF_A_RUN = ["--norm", "--groups", "--seed", "PowerNorm recipe", "PowerNorm alpha", "micro-batch",
            "weights at the start (as a hash)"]


def short(value):
    """Six digits are enough of a loss."""
    return None if value is None else float(f"{value:.6g}")


def record(study, outcome):
    losses = {key: short(outcome[key]) for key in ("val_loss", "train_loss", "test_loss")}
    if outcome.get("test_loss_folded") is not None:
        losses["test_loss_folded"] = short(outcome["test_loss_folded"])
    curve = [[step, short(loss)] for step, loss in outcome["val"]]
    of = {"study": study, "run": outcome["variant"], "seed": outcome["seed"]}
    return of | losses | {"val": curve}


def common(settings):
    """A run with smaller parts has as many warm-up steps of the optimizer, each of several parts."""
    warmup = settings["PowerNorm warm-up"] * settings["micro-batch"] // settings["batch"]
    shared = {key: settings[key] for key in settings if key not in OF_A_RUN}
    return shared | {"PowerNorm warm-up": warmup}


def files(folders, pattern):
    return sorted(file for folder in folders for file in folder.glob(pattern))


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    study, folders = sys.argv[1], [Path(folder) for folder in sys.argv[2:]]
    for folder in folders:
        if not folder.is_dir():
            sys.exit(f"{folder} is no folder")
    path, settings_path = HERE / "language.jsonl", HERE / "studies.json"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    studies = json.loads(settings_path.read_text())
    by_name = {(r["study"], r["run"], r["seed"]): r for r in records}
    for file in files(folders, "*.json"):
        outcome = json.loads(file.read_text())
        ours = common(outcome["settings"])
        theirs = studies.setdefault(study, ours)
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                sys.exit(f"{file} has {key} {ours.get(key)}, {study} has {theirs.get(key)}")
        new = record(study, outcome)
        name = (study, new["run"], new["seed"])
        old = by_name.setdefault(name, new)
        if old != new:
            sys.exit(f"{file} has {new}, on record is {old}")
        if old is new:
            records.append(new)
            print("on record:", *name)
    for file in files(folders, "*.safetensors"):
        print("not finished:", file)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    settings_path.write_text(json.dumps(studies, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
