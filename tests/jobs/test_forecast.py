"""What a site may gain: the curve's fit, the words, restarts, and that no test note is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_jobs import TABLE, corpus

import fednotes as fn
from fednotes.cli.display import forecast_table
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.jobs.forecast import Forecast, ForecastPlan, Trained, forecast, outlook
from fednotes.jobs.job import Job, Sites
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import Display, simulate

PLAN = ForecastPlan(fractions=(1 / 2,), seeds=2, part=1 / 2)


def run(fraction: float, logit: float, sentences: int = 800) -> Trained:
    """One whose log odds are these."""
    f1 = 1 / (1 + np.exp(-logit))
    return Trained(fraction=fraction, sentences=int(fraction * sentences), f1=f1, error=0.01)


def gained(times: float, steep: float, floor: float) -> float:
    return -float(np.log(floor + (1 - floor) * times**-steep))


def runs(
    worth: float, steep: float = 0.5, floor: float = 0.0, noise: float = 0.02, seed: int = 0
) -> tuple[list[Trained], list[Trained]]:
    """Curve and pilot of a site for which the federation is worth so many times its own."""
    rng = np.random.default_rng(seed)

    def drawn(fraction: float, times: float) -> Trained:
        return run(fraction, gained(times, steep, floor) + rng.normal(0, noise / fraction**0.25))

    curve = [drawn(f, f) for f in (1 / 8, 1 / 4, 1 / 2) for _ in range(3)]
    return [*curve, drawn(1, 1)], [drawn(1 / 4, worth / 4) for _ in range(3)]


def test_exact_points_are_gone_through() -> None:
    """(1 - F1) / F1 = 0.1 + 0.9 n ** -0.6, of n times all of the site's sentences."""
    found = outlook(*runs(2.0, 0.6, 0.1, noise=0.0), 3200, ForecastPlan())
    assert found.alone[1] == pytest.approx(0.5, abs=0.01)
    odds = {times: 0.1 + 0.9 * times**-0.6 for times in (2, 4)}
    gain, bound = 1 / (1 + odds[2]) - 0.5, 1 / (1 + odds[4])
    for of, true in ((found.bound, bound), (found.worth, 2), (found.gain, gain)):
        assert of[0] <= true <= of[2]
        assert of[1] == pytest.approx(true, rel=0.3)
    assert found.words == "join"


def test_what_hardly_differs_has_the_same_forecast() -> None:
    """Points within a ten-thousandth, of runs that differ as little by chance."""
    curve, pilot = runs(1.5, 0.4, 0.3, noise=0.01)
    gains = []
    for shift in (0.0, 1e-4, -1e-4):
        moved = [p.model_copy(update={"f1": p.f1 + shift}) for p in curve]
        gains.append(outlook(moved, pilot, 20_000, ForecastPlan()).gain)
    np.testing.assert_allclose(gains[1:], [gains[0]] * 2, atol=0.006)


def test_intervals_hold_what_they_claim() -> None:
    """Curves and federations drawn at random: about 80 % of the gains, and of the bounds."""
    rng, held = np.random.default_rng(1), np.zeros(2)
    turns = 60
    for turn in range(turns):
        worth, steep, floor = 5 ** rng.uniform(-0.5, 1), rng.uniform(0.1, 1), rng.uniform(0, 0.8)
        found = outlook(*runs(worth, steep, floor, 0.05, turn), 4000, ForecastPlan())
        for at, (of, times) in enumerate(((found.gain, worth), (found.bound, 5.0))):
            true = 1 / (1 + np.exp(-gained(times, steep, floor))) - 0.5 * (at == 0)
            held[at] += of[0] <= true <= of[2]
    assert (0.65 * turns < held).all()


@pytest.mark.parametrize(("worth", "words"), [(4.5, "join"), (0.3, "stay alone")])
def test_the_pilot_decides(worth: float, words: str) -> None:
    curve, pilot = runs(worth, noise=0.02)
    assert outlook(curve, pilot, 4000, ForecastPlan()).words == words
    without = outlook(curve, [], 4000, ForecastPlan())
    assert without.words == "cannot tell"
    assert without.gain[0] < 0 < without.gain[2]

    learnt_nothing = outlook(curve, [run(1 / 4, -9.0)], 4000, ForecastPlan())
    assert learnt_nothing.gain == without.gain
    clear, nothing = outlook(curve, [], 801, ForecastPlan()), run(1, -3.0)  # F1 0.047
    assert clear.words == "stay alone"  # there is next to nobody to gain from
    for points, tried in (
        (curve, [run(1 / 4, -3.0)]),
        ([*curve[:-1], nothing], []),
        ([nothing], []),
    ):
        assert outlook(points, tried, 801, ForecastPlan()).words == "cannot tell"
    flat, _ = runs(1.0, steep=0.0, noise=0.005)
    assert outlook(flat, [], 1600, ForecastPlan(least=0.02)).words == "stay alone"


def test_the_rule() -> None:
    words = ForecastPlan().words
    assert words((0.001, 0.02, 0.05)) == "join"
    assert words((-0.01, 0.02, 0.05)) == words((0.001, 0.009, 0.02)) == "cannot tell"
    assert words((-0.03, -0.01, 0.009)) == "stay alone"


def job(folder: Path, **changes: Any) -> Job:
    table = {**TABLE, "synthetic": {"sites": 2, "sentences": 60}, **changes}
    return parse_job({k: v for k, v in table.items() if v is not None}, "tiny", folder, "tiny")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Forecast]:
    folder = tmp_path_factory.mktemp("forecasts")
    return folder / "out", forecast(job(folder), folder / "out", PLAN)


def test_a_forecast_from_job_to_table(done: tuple[Path, Forecast]) -> None:
    out, found = done
    assert Forecast.model_validate_json((out / "forecast.json").read_text()) == found
    assert list(found.sites) == ["discharge", "reports"]
    for of in found.sites.values():
        assert [p.fraction for p in of.curve] == [0.5, 0.5, 1.0]
        assert [p.fraction for p in of.pilot] == [0.5, 0.5]
        assert of.curve[0].sentences == of.pilot[0].sentences < of.curve[2].sentences
        assert of.gain[0] <= of.gain[1] <= of.gain[2]
    assert found.seconds
    assert found.cost.up > 0
    assert not list(out.rglob("*.safetensors"))  # many models, which nobody asked for
    row = forecast_table(found).columns[-1]
    assert list(row.cells) == [of.words for of in found.sites.values()]


def test_a_curve_ends_with_what_simulate_trains_alone(
    done: tuple[Path, Forecast], tmp_path: Path
) -> None:
    of = simulate(job(tmp_path, conditions=["alone"]), tmp_path / "run").valid["alone"]["sites"]
    assert of == pytest.approx({s: f.curve[-1].f1 for s, f in done[1].sites.items()})


class Stop(Display):
    """Stops after so many parts; and counts them."""

    def __init__(self, after: int = 0) -> None:
        self.after, self.begun = after, list[str]()

    def begin(self, part: Any, rounds: int, sentences: int) -> None:
        self.begun.append(part.name)
        if len(self.begun) == self.after:
            raise KeyboardInterrupt


def test_a_stopped_forecast_goes_on(done: tuple[Path, Forecast], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        forecast(job(tmp_path), out, PLAN, progress=Stop(4))
    with pytest.raises(ConfigError, match="holds a run already"):
        forecast(job(tmp_path), out, PLAN)
    with pytest.raises(ConfigError, match="another job"):
        forecast(job(tmp_path, seed=2, title="other"), out, PLAN, resume=True)
    rest = Stop()
    assert forecast(job(tmp_path), out, PLAN, resume=True, progress=rest).sites == done[1].sites
    assert len(rest.begun) == 3 * 2 + 2 - 3


def test_no_test_note_is_read(done: tuple[Path, Forecast], tmp_path: Path) -> None:
    """Other texts, other mentions, none at all: nothing changes."""
    plain = job(tmp_path)

    def garbled(*arguments: Any) -> Sites:
        sites = plain.kind.load(plain, None, None)
        other = [replace(d, text=d.text[::-1], spans=()) for d in sites.data[1].test]
        first = replace(sites.data[0], test=())
        return replace(sites, data=(first, replace(sites.data[1], test=tuple(other[:3]))))

    garbage = replace(plain, kind=replace(plain.kind, load=garbled))
    assert forecast(garbage, tmp_path / "out", PLAN).sites == done[1].sites


def files_of(folder: Path, **keys: float) -> dict[str, Any]:
    """Two sites of files."""
    for name, word in (("north", "aspir"), ("south", "statin")):
        corpus(folder / f"{name}.conll", "Drug", word)
    return {s: {"path": f"{s}.conll", "split": "sentence", **keys} for s in ("north", "south")}


def test_jobs_that_nothing_can_be_said_of(tmp_path: Path) -> None:
    sites = {"synthetic": None, "sites": files_of(tmp_path, valid_fraction=0.0)}
    for changes, message in (
        ({"synthetic": {"sites": 1, "sentences": 60}}, "nobody to federate with"),
        ({"method": "pretrain", "training": {}, "model": {}}, "sites hold notes"),
        (sites, r"'north' holds out no annotated note.*valid_fraction"),
    ):
        with pytest.raises(ConfigError, match=message):
            forecast(job(tmp_path, **changes), tmp_path / "out", PLAN)


def test_at_home_a_site_has_its_curve_and_the_pilots_model(tmp_path: Path) -> None:
    table = {**TABLE, "sites": files_of(tmp_path)}
    del table["synthetic"]
    lines = [f"{key} = {json.dumps(table[key])}" for key in ("method", "seed")]
    parts = {name: table[name] for name in ("training", "model")}
    parts |= {f"sites.{name}": keys for name, keys in table["sites"].items()}
    for name, keys in parts.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in keys.items())]
    path, file = tmp_path / "job.toml", tmp_path / "site.toml"
    path.write_text("\n".join(lines))
    short = job(tmp_path, synthetic=None, sites=table["sites"])
    simulate(replace(short, conditions=("federated",)), tmp_path / "run")
    pilot = tmp_path / "run/federated/sites/north"
    (tmp_path / "south.conll").unlink()  # nobody else's notes are needed
    file.write_text('[data]\npath = "north.conll"\nsplit = "sentence"\n')
    own: Any = {"site": "north", "total": 100}
    found = [
        fn.forecast(path, tmp_path / "one", PLAN, **own),
        fn.forecast(path, tmp_path / "two", PLAN, site_file=file, pilots=pilot, **own),
    ]
    assert isinstance(found[0], fn.Forecast)
    assert [len(each.sites["north"].pilot) for each in found] == [0, 1]
    assert found[0].sites["north"].curve == found[1].sites["north"].curve
    assert found[0].seconds is None
    with pytest.raises(ConfigError, match="this site alone has"):
        fn.forecast(path, tmp_path / "x", PLAN, site="north", site_file=file, total=3)
    with pytest.raises(ConfigError, match=r"no \[sites.east\]"):
        fn.forecast(path, tmp_path / "x", PLAN, site="east", total=100)
    with pytest.raises(FednotesError, match="nowhere"):
        fn.forecast(path, tmp_path / "x", PLAN, pilots=[tmp_path / "nowhere"], **own)
    with pytest.raises(ConfigError, match="--site and --total go together"):
        fn.forecast(path, tmp_path / "x", PLAN, site="north")
    with pytest.raises(ConfigError, match="name the job's file"):
        fn.forecast(short, tmp_path / "x", PLAN, **own)


def test_a_forecast_does_not_lie_among_other_files(tmp_path: Path) -> None:
    """Its runs would lie among notes; its own folder, and an empty one, go as far as the job."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "1.txt").write_text("No pain.")
    for place in ("notes", "notes/1.txt"):
        with pytest.raises(ConfigError, match="not the folder of a forecast, nor empty"):
            fn.forecast("demo", tmp_path / place, PLAN)
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["1.txt"]
    own = tmp_path / "own"
    (own / "alone-0.5-1").mkdir(parents=True)
    (own / "forecast.json").write_text("{}")
    alone = {**TABLE, "synthetic": {**TABLE["synthetic"], "sites": 1}}  # a table is a job too
    with pytest.raises(ConfigError, match="nobody to federate with"):
        fn.forecast(alone, own, PLAN)


def test_a_plan_is_a_table_too_and_settings_are_of_a_file(tmp_path: Path) -> None:
    alone = {**TABLE, "synthetic": {**TABLE["synthetic"], "sites": 1}}
    with pytest.raises(ConfigError, match="nobody to federate with"):
        fn.forecast(alone, tmp_path / "x", {"seeds": 2, "part": 0.5})
    with pytest.raises(ConfigError, match=r"plan: unknown key 'seed'"):
        fn.forecast(alone, tmp_path / "x", {"seed": 2})
    with pytest.raises(ConfigError, match="plan"):
        fn.forecast(alone, tmp_path / "x", "fast")  # type: ignore[arg-type]
    for given in (alone, job(tmp_path)):
        with pytest.raises(ConfigError, match="settings are of a job's file"):
            fn.forecast(given, tmp_path / "x", PLAN, settings=["seed=2"])
    assert not (tmp_path / "x").exists()


def test_the_command(tmp_path: Path, give: Any) -> None:
    one = 'method = "fedner"\n[synthetic]\nsites = 1\n[training]\nepochs = 1\n'
    (tmp_path / "job.toml").write_text(one, encoding="utf-8")
    code, _, err = give("forecast", tmp_path / "job.toml", "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "nobody to federate with" in err
    for wrong in (("--fractions", "1/0"), ("--site", "north"), ("--part", "2")):
        assert give("forecast", "demo", "--out", tmp_path / "x", *wrong)[0] == 2
