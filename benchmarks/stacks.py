"""Other people's stacks: their own parallel code on tiny models, verified as anyone would, from case files alone.

    python benchmarks/stacks.py [--families qwen3_moe,...] [--modes tp,fsdp,...] [--narrow tp,...]
        [--reports FOLDER] [--checkouts FOLDER] [--out PAGE]
    python benchmarks/stacks.py --transformers 5.24.0 [--families ...] [--modes ...] [--narrow=]

Runs the cases of examples/stacks, a sweep over families of transformers under its tensor, expert and data
parallelism, part of it in bfloat16 too, and older releases of transformers. Every case is a recipe and one line of
layout; none has code. Frameworks and releases go into virtual environments of their own, which are made where they
are missing. Projects without a package are read from the folder --checkouts, or left out. With --transformers, only
the families are swept, with that release, and the table is printed.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

from stacks_families import COMMON, FAMILIES, MIXTURES, NO_PLAN
from stacks_known import KNOWN, NARROW_KNOWN, RELEASES_KNOWN

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "stacks"

# The distribution whose parallel code each folder's cases verify.
FRAMEWORKS = {
    "transformers": "transformers",
    "torch_native": "torch",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "megatron": "megatron-core",
    "modalities": "modalities",
    "nemo_automodel": "nemo-automodel",
    "olmo_core": "ai2-olmo-core",
    "picotron": "picotron",
    "torchtune": "torchtune",
}
CHECKOUTS = {"picotron": "huggingface/picotron"}  # without a package
# Packages of each environment that the current one may lack, or has in another release. An environment with the
# name of a folder of examples is that folder's.
RELEASES = ("5.17.0", "5.20.0", "5.23.0")
ENVIRONMENTS = {
    "frameworks": ("deepspeed==0.19.8", "lightning==2.6.6", "megatron-core==0.16.1", "torchtitan==0.3.0"),
    "modalities": ("modalities==0.5.0", "transformers==4.57.1"),
    "nemo_automodel": ("nemo-automodel==0.7.0", "transformers==5.18.0"),
    "olmo_core": ("ai2-olmo-core==3.0.0",),
    "torchtune": ("torchtune==0.6.1", "torchao==0.13.0"),
    **{f"transformers-{release}": (f"transformers=={release}", "accelerate==1.15.0") for release in RELEASES},
}
NEWEST = f"transformers-{RELEASES[-1]}"

# Layout, implementation of the experts, precision. torch's grouped_mm has no float64. FSDP with expert
# parallelism is verified in float32, since torch 2.13.0 divides expert gradients twice in float64
# (examples/found).
MODES = {
    "tp": ({"tp": 2}, "eager", "float64"),
    "tp-accumulation": ({"tp": 2, "micro_batches": 2}, "eager", "float64"),
    "tp-ep": ({"tp": 2, "arguments": {"ep_size": 2}}, "eager", "float64"),
    "tp-ep-batched_mm": ({"tp": 2, "arguments": {"ep_size": 2}}, "batched_mm", "float64"),
    "tp-ep-grouped_mm": ({"tp": 2, "arguments": {"ep_size": 2}}, "grouped_mm", "float32"),
    "tp-ep-all_reduce": (
        {"tp": 2, "arguments": {"ep_size": 2, "ep_implementation": "all_reduce"}},
        "eager",
        "float64",
    ),
    "fsdp": ({"dp_shard": 2}, "eager", "float64"),
    "fsdp-accumulation": ({"dp_shard": 2, "micro_batches": 2}, "eager", "float64"),
    "fsdp-ep": ({"dp_shard": 2, "arguments": {"ep_size": 2}}, "eager", "float32"),
    "fsdp-ep-grouped_mm": ({"dp_shard": 2, "arguments": {"ep_size": 2}}, "grouped_mm", "float32"),
    "fsdp-tp": ({"dp_shard": 2, "tp": 2}, "eager", "float64"),
    "fsdp-tp-ep": ({"dp_shard": 2, "tp": 2, "arguments": {"ep_size": 4}}, "eager", "float32"),
}
# Layouts of OLMoE for each release: releases before 5.21 have a flag for expert parallelism, and accept it
# without a size, which divides nothing.
RELEASE_MODES = {
    "flag": {"tp": 2, "arguments": {"enable_expert_parallel": True}},
    "flag-without-size": {"tp": 2, "arguments": {"enable_expert_parallel": True, "tp_size": None}},
}
# Families that keep some parameters in float32. FSDP2 accepts these only beside other float32 parameters.
FLOAT32_UNDER_FSDP = ("ernie4_5_moe", "hunyuan_v1_moe")
# Families that keep some parameters in float32 in every layout: all else is verified in float32 too.
FLOAT32 = ("olmo_hybrid",)
SHORT = 40  # characters of a cell; a longer one is a note below its table
# Modes that are verified in bfloat16 too, each as above except for the precision.
NARROW = "bfloat16"
NARROW_MODES = (
    "tp",
    "tp-accumulation",
    "tp-ep",
    "tp-ep-grouped_mm",
    "fsdp",
    "fsdp-accumulation",
    "fsdp-ep",
)


def write_case(folder, family, mode, narrow=""):
    """Write the case of a family and mode, with its recipe; return its path. `narrow`: other precision."""
    layout, experts, precision = (
        MODES[mode] if mode in MODES else (RELEASE_MODES[mode], "batched_mm", "float64")
    )
    if family in FLOAT32 or (family in FLOAT32_UNDER_FSDP and "dp_shard" in layout):
        precision = "float32"
    precision = narrow or precision
    name = f"{family}-{experts}-{precision}"
    arguments = {"model_type": family} | COMMON | FAMILIES[family]
    recipe = {
        "model": {
            "factory": "moeverify.stacks.transformers:make",
            "arguments": arguments | ({"experts": experts} if family in MIXTURES else {}),
            "vocab_size": COMMON["vocab_size"],
        },
        "data": {"batch": 8, "seq_len": 10, "min_valid": 0.5},
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.1},
        "steps": 1,
        "precision": precision,
    }
    (folder / "recipes").mkdir(parents=True, exist_ok=True)
    (folder / "recipes" / f"{name}.yaml").write_text(json.dumps(recipe))
    parallelize = {"parallelize": "moeverify.stacks.transformers:parallelize"}
    case = {"name": f"{family}--{mode}", "recipe": name, "layout": layout | parallelize}
    path = folder / f"{family}--{mode}.yaml"
    path.write_text(json.dumps(case | {"checks": {"timeout": 300.0, "repeat": "never"}}))
    return path


def make_environment(folder):
    """Create the virtual environment of that name in `ENVIRONMENTS`, unless it exists; return its Python.

    Packages that it does not install, above all torch, come from the environment that runs this.
    """
    python, own = folder / "bin" / "python", ENVIRONMENTS[folder.name]
    installed = folder / "installed.txt"
    if installed.exists() and installed.read_text().split() == list(own):
        return python
    print(f"making {folder}", flush=True)
    venv.create(folder, clear=True, symlinks=True)
    libraries = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (libraries / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    names = [requirement.partition("==")[0] for requirement in own]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in pinned if line.partition("==")[0] not in names))
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["-c", str(constraints), "torch", *own]
    # Otherwise DeepSpeed would build operations for devices that may be absent.
    subprocess.run(command, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    # Written last: an incomplete environment is made again.
    installed.write_text("\n".join(own))
    return python


def find_python(release, environments):
    """Return the interpreter of a release of transformers, or the one that is given by its path."""
    if os.sep in release:
        return Path(release).absolute()
    name = f"transformers-{release}"
    ENVIRONMENTS.setdefault(name, (f"transformers=={release}", "accelerate==1.15.0"))
    return make_environment(environments / name)


def list_new_families(python):
    """Return the causal language models of an interpreter's transformers that have no fields in `FAMILIES`."""
    program = (
        "from transformers.models.auto import modeling_auto as m; print(*m.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)"
    )
    printed = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return sorted(set(printed.stdout.split()) - set(FAMILIES))


def list_versions(python):
    """Return the installed versions of the frameworks of an interpreter, by distribution name."""
    names = ("torch", *dict.fromkeys(FRAMEWORKS.values()))
    program = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.name for d in m.distributions()}\n"
        "print(json.dumps({name: m.version(name) for name in sys.argv[1:] if name in found}))"
    )
    printed = subprocess.run([python, "-c", program, *names], capture_output=True, text=True, check=True)
    return json.loads(printed.stdout)


def find_commit(checkout):
    """Return the commit of a checkout, or `checkout` where git knows none."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "checkout"


def run_cases(paths, python, scratch, reports, checkout=None):
    """Run the cases without a report in one launch, keep one report per case, and return all reports.

    `checkout` is the folder of a project that the cases import.
    """
    kept = {path: reports / f"{path.parent.name}--{path.stem}.json" for path in sorted(paths)}
    missing = [path for path, report in kept.items() if not report.exists()]
    if missing:
        together = scratch / "together.json"
        together.unlink(missing_ok=True)
        command = [str(python), "-m", "moeverify", "run", *map(str, missing), "--device", "cpu"]
        command += ["--json", str(together), "--quiet"]
        command += ["--cache", str(scratch / "cache"), "--goldens", str(scratch / "goldens")]
        started = time.monotonic()
        sources = [str(ROOT), os.environ.get("PYTHONPATH"), checkout and str(checkout)]
        paths_of_modules = os.pathsep.join(filter(None, sources))
        environment = os.environ | {"PYTHONPATH": paths_of_modules}
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment, check=False)
        print(
            f"{len(missing)} cases of {paths[0].parent.name}: {time.monotonic() - started:.0f} s", flush=True
        )
        versions = list_versions(python) | ({checkout.name: find_commit(checkout)} if checkout else {})
        # Files of two folders may have one name.
        by_file = {
            (ROOT / case["file"]).resolve(): case for case in json.loads(together.read_text())["cases"]
        }
        for path in missing:
            kept[path].write_text(json.dumps(by_file[path.resolve()] | {"versions": versions}))
    return [json.loads(report.read_text()) for report in kept.values()]


def choose(families, modes):
    """Return the pairs of a family and a supported mode: experts are for mixtures, tp for families with a plan."""
    return [
        (family, mode)
        for family in families
        for mode in modes
        if (family in MIXTURES or "ep" not in mode) and (family not in NO_PLAN or "tp" not in mode)
    ]


def run_examples(environments, scratch, reports, checkouts):
    """Run the example cases, one launch per framework: changes to torch then affect only that launch."""
    reported = []
    for folder in sorted(path for path in EXAMPLES.iterdir() if path.is_dir()):
        name, checkout = folder.name, None
        if name in CHECKOUTS:
            checkout = checkouts and (checkouts / name).resolve()
            if checkout is None or not checkout.is_dir():
                print(
                    f"{name} is left out: it needs --checkouts with https://github.com/{CHECKOUTS[name]} in it"
                )
                continue
        own = any(line.startswith(f"{FRAMEWORKS[name]}==") for line in ENVIRONMENTS["frameworks"])
        environment = name if name in ENVIRONMENTS else "frameworks" if own else NEWEST
        python = make_environment(environments / environment)
        reported += run_cases(sorted(folder.glob("*.yaml")), python, scratch, reports, checkout)
    return reported


def run_families(options, modes, python, scratch, reports):
    """Verify the families in all modes, and in those of `--narrow` in bfloat16; return the reports of both."""
    families = [family for family in options.families.split(",") if family]
    narrow_modes = [mode for mode in options.narrow.split(",") if mode]
    sweep, narrow = [], []
    for first in range(0, len(families), options.together):
        some = families[first : first + options.together]
        cases = [write_case(scratch / "sweep", *pair) for pair in choose(some, modes)]
        sweep += run_cases(cases, python, scratch, reports)
        cases = [write_case(scratch / NARROW, *pair, NARROW) for pair in choose(some, narrow_modes)]
        narrow += run_cases(cases, python, scratch, reports) if cases else []
    return sweep, narrow


def run_releases(environments, scratch, reports):
    """Verify each release of transformers in the layouts of `RELEASE_MODES`; return reports by release."""
    reported = {}
    for release in RELEASES:
        python = make_environment(environments / f"transformers-{release}")
        paths = [write_case(scratch / f"release-{release}", "olmoe", mode) for mode in RELEASE_MODES]
        reported[release] = run_cases(paths, python, scratch, reports)
    return reported


def describe_releases(releases):
    """Return the table of the releases as lines of Markdown."""
    lines = [
        "",
        "## Releases of transformers",
        "",
        "OLMoE, `batched_mm`, 2 ranks, two ways to ask for experts.",
    ]
    lines += ["", f"| release | {' | '.join(RELEASE_MODES)} |", "|---" * (len(RELEASE_MODES) + 1) + "|"]
    for release, cases in releases.items():
        modes = {case["name"].partition("--")[2]: case for case in cases}
        cells = {mode: describe(case, RELEASES_KNOWN.get((release, mode))) for mode, case in modes.items()}
        lines.append(f"| {release} | {' | '.join(cells[mode] for mode in RELEASE_MODES)} |")
    return lines


def count_tensors(case):
    """Return the number of logical tensors that the checks of a case have compared."""
    return sum(check["tensors"] for check in case["checks"])


def describe(case, known):
    """Return the verdict of a case as a cell: with the cause if it differs, and whether that is known."""
    if case["verdict"] == "pass":
        return "pass" + (f" (declared as a bug of {known.release}: fixed?)" if known else "")
    if case["verdict"] == "error":
        reason = case["reason"].splitlines()[0]
        seen, told = [reason], f"error: {reason[:90]}"
    else:
        finding = case["findings"][0]
        found = case["findings"]
        seen = [each["tensor"] for each in found if (each["check"], each["step"]) == ("gradient", 0)]
        seen = seen or [finding["tensor"]]
        told = f"**{finding.get('cause') or finding['check']}** in `{finding['tensor']}`"
        if known and not re.search(known.cause, finding.get("cause", "")):
            return told
    if known and seen and all(re.search(known.wrong, each) for each in seen):
        return str(known)
    return told


def describe_declared(path):
    """Return the reason of the differences that a case file declares, or an empty text."""
    match = re.search(r'because: "(.*?)(?: \(examples/found\))?"', path.read_text())
    return f"declared: {match[1]}" if match else ""


def collect_versions(cases):
    """Return the versions of the frameworks that cases ran with."""
    return {name: version for case in cases for name, version in case["versions"].items()}


def make_page(command, examples, sweep, modes, releases, narrow):
    """Return the page as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in collect_versions(examples).items())
    lines = [
        "# Frameworks",
        "",
        "The parallel code of other frameworks on tiny models, verified from case files alone. CPUs,",
        "gloo, AdamW, a clip that binds, two steps in the examples, one in the sweep. `accumulation` is 2",
        "micro-batches. Experts are `eager` unless a mode names others. The precision is float64,",
        "except for DeepSpeed, Megatron, the cp of picotron, `grouped_mm`, and FSDP with experts of transformers,",
        "which use float32. `make stacks` makes this page.",
        "",
        f"`{command}`, {datetime.datetime.now(datetime.UTC).date()}, python {platform.python_version()}, {versions}",
        "",
        "## Ready-made adapters",
        "",
        "A `declared` case differs as its file says, mostly by a bug in [examples/found](../../examples/found).",
        "",
        "| Release | Cases, compared tensors | Verdict |",
        "|---|---|---|",
    ]
    rows = {}
    for case in examples:
        verdict = describe(case, None)
        if verdict == "pass":
            verdict = describe_declared(Path(ROOT / case["file"])) or verdict
        framework = FRAMEWORKS[Path(case["file"]).parent.name]
        release = f"{framework} {case['versions'][framework]}"
        rows.setdefault((release, verdict), []).append(f"{Path(case['file']).stem} {count_tensors(case)}")
    lines += [f"| {release} | {', '.join(cases)} | {verdict} |" for (release, verdict), cases in rows.items()]
    lines += ["", f"## Families of {NEWEST.replace('-', ' ')}", ""]
    notes = {}
    lines += describe_sweep(sweep, modes, KNOWN, notes)
    if narrow:
        lines += describe_narrow(narrow, notes)
    lines += describe_releases(releases)
    return "\n".join(lines) + "\n"


def describe_sweep(sweep, modes, known, notes):
    """Return the table of families and modes, its notes and its sums. Equal families share a row.

    `notes` has the numbers of the notes of other tables, and gets those of this one.
    """
    others = len(notes)
    lines = [f"| families | {' | '.join(modes)} |", "|---" * (len(modes) + 1) + "|"]
    by_name = {case["name"]: case for case in sweep}
    explained = 0
    rows = {}
    for family in dict.fromkeys(case["name"].partition("--")[0] for case in sweep):
        cells = []
        for mode in modes:
            case = by_name.get(f"{family}--{mode}")
            reason = known.get((family, mode))
            cells.append("" if case is None else describe(case, reason))
            explained += case is not None and case["verdict"] != "pass" and cells[-1] == str(reason)
        rows.setdefault(tuple(cells), []).append(family)
    for cells, families in rows.items():
        short = [
            cell if len(cell) < SHORT else f"note {notes.setdefault(cell, len(notes) + 1)}" for cell in cells
        ]
        lines.append(f"| {', '.join(families)} | {' | '.join(short)} |")
    lines += ["", *(f"{number}. {cell}" for cell, number in notes.items() if number > others)]
    passed = sum(case["verdict"] == "pass" for case in sweep)
    rest = f"{explained} have a known bug of others, {len(sweep) - passed - explained} are not explained"
    total = sum(map(count_tensors, sweep))
    return [*lines, "", f"{passed} of {len(sweep)} combinations pass, {rest}; {total} tensors were compared."]


def describe_narrow(cases, notes):
    """Return the table of the bfloat16 results, with the smallest reliably detected gradient error.

    `notes` are those of the table before it.
    """
    lines = [
        "",
        "## In bfloat16",
        "",
        "Weights, gradients and optimizer state are in bfloat16. A gradient is undecided if rounding, which moves",
        "tokens to other experts, may change more than half of it. Clip and optimizer steps are recomputed from each",
        "rank's own values and are decided everywhere.",
        "",
    ]
    modes = [mode for mode in MODES if any(case["name"].endswith(f"--{mode}") for case in cases)]
    lines += describe_sweep(cases, modes, KNOWN | NARROW_KNOWN, notes)
    limits = [limits for case in cases if (limits := find_limits(case))]
    medians = [median for median, _, _ in limits]
    undecided, compared = (sum(each[place] for each in limits) for place in (1, 2))
    told = f"{undecided} of {compared} gradients are undecided; for the others, the smallest seen error"
    return (
        [*lines, "", f"{told} has a median of {min(medians):.0%} to {max(medians):.0%}."] if limits else lines
    )


def find_limits(case):
    """Return the median reliably detected gradient error, the number of undecided ones, and the total."""
    for check in case["checks"]:
        if check["name"] == "gradient" and check["limits"]:
            return check["limits"]["median"], check["blind"], check["tensors"]
    return None


def main():
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "stacks.md")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument(
        "--narrow", default=",".join(NARROW_MODES), help=f"modes that are verified in {NARROW} too"
    )
    parser.add_argument(
        "--reports", type=Path, help="folder that keeps every report: what is there is not run again"
    )
    parser.add_argument(
        "--checkouts", type=Path, metavar="FOLDER", help="checkouts of projects without a package"
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / ".venv-stacks",
        help="folder of the virtual environments (default: .venv-stacks)",
    )
    parser.add_argument(
        "--transformers", metavar="RELEASE", help="sweep this release, or an interpreter (a path), and print"
    )
    parser.add_argument("--together", type=int, default=18, help="families in one launch")
    options = parser.parse_args()
    modes = options.modes.split(",")
    given = {"--families": options.families, "--modes": options.modes, "--narrow": options.narrow}
    chosen = [word for pair in given.items() if pair[1] != parser.get_default(pair[0][2:]) for word in pair]
    command = shlex.join(["python", "benchmarks/stacks.py", *chosen])
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        reports = options.reports or scratch
        reports.mkdir(parents=True, exist_ok=True)
        environments = options.environments.resolve()
        if options.transformers:
            python = find_python(options.transformers, environments)
            sweep, narrow = run_families(options, modes, python, scratch, reports)
            notes = {}
            print(*describe_sweep(sweep, modes, KNOWN, notes), sep="\n")
            print(*(describe_narrow(narrow, notes) if narrow else ()), sep="\n")
            print(f"\nversions: {collect_versions(sweep)}")
            print("families without fields here:", *list_new_families(python))
            return
        releases = run_releases(environments, scratch, reports)
        examples = run_examples(environments, scratch, reports, options.checkouts)
        python = make_environment(environments / NEWEST)
        sweep, narrow = run_families(options, modes, python, scratch, reports)
        options.out.write_text(make_page(command, examples, sweep, modes, releases, narrow))


if __name__ == "__main__":
    main()
