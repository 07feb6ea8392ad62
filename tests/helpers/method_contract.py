"""What every method must do, as tests that run over its cases.

A subclass in a test module names the cases (`method_runs.MakeCase`):

    class TestMyMethod(MethodContract):
        cases = {"my method": make_case}

Each case trains once in one process without a fault, and most tests compare another run
with that one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
import unit_gradients
import wrong_messages
from compared_sums import Compared, check_sums
from fault_net import Net, ServerKilled
from held_sites import held_in_two
from method_runs import (
    SETTINGS,
    Job,
    MakeCase,
    Recording,
    Reference,
    assert_close_facts,
    bits,
    copied,
    find_uses_of_earlier_tasks,
    fixed_marks,
    with_known,
)
from scipy import stats
from two_jobs import MOST, remaining

from fednotes.core.federation import State
from fednotes.core.messages import Frame
from fednotes.core.seeds import Draws
from fednotes.engines.inprocess import InProcess
from fednotes.engines.sampling import RoundSampling
from fednotes.engines.simulation import Simulation
from fednotes.privacy.noise import SCALE
from fednotes.privacy.training import NOISY
from fednotes.training.site_sampling import count_drawn_sites

COUNT_STEP = 10  # no size of a site is a multiple of it
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
FAULTS = [pytest.param(12, id="every twelfth"), pytest.param(1, marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Way:
    """How the parts of a run are restarted.

    Attributes:
        sites: Whether all sites are restarted before each question.
        server: How many questions more the server asks in each of its lives than in the
            one before; 0: it is not restarted.
        keeping: Seconds of work after which a site saves a state of its own at the start
            of a round.
    """

    sites: bool = False
    server: int = 0
    keeping: float = 1e9


SITES_EACH_ROUND = Way(sites=True, keeping=0.0)
WAYS = [
    pytest.param(SITES_EACH_ROUND, id="sites with a state for each round"),
    pytest.param(
        Way(sites=True),
        id="sites with a state for each checkpoint",
        marks=pytest.mark.slow,
    ),
    pytest.param(Way(server=1), id="server", marks=pytest.mark.slow),
    pytest.param(
        # Fewer lives, because each of them restarts all sites many times.
        replace(SITES_EACH_ROUND, server=7),
        id="sites and server",
        marks=pytest.mark.slow,
    ),
]


class Restarts(Net):
    """Hosts that are restarted in one way."""

    way = Way()
    lives = 0  # of the server
    questions = 0  # in its present life

    def keeping(self, site: str) -> float:
        del site
        return self.way.keeping

    def exchange(
        self, frames: Mapping[str, Frame], **limits: Any
    ) -> Iterator[tuple[str, Frame]]:
        if self.way.sites:
            self.hosts.clear()
        if self.way.server and self.questions == self.lives * self.way.server:
            raise ServerKilled
        self.questions += 1
        yield from super().exchange(frames, **limits)


def run_until_done(net: Net, job: Job) -> tuple[State, list[Any]]:
    """Run a job, again and again if the server is killed; return its end and its sites."""
    names = [site.id for site in job.sites]
    with fixed_marks():
        for _ in range(200):
            if isinstance(net, Restarts):
                net.questions = 0
                net.lives += 1
            try:
                ended = job.train(net.engine(names))
            except ServerKilled:
                continue
            return ended, [net.host(name)._prepare_site() for name in names]
    raise AssertionError("the server did not come to the end of the run")


def run_with_restarts(
    reference: Reference, way: Way, folder: Path
) -> tuple[State, list[Any]]:
    net = Restarts(reference.job.makes(folder / "sites"), folder / "net")
    net.way = way
    ended, members = run_until_done(net, reference.job)
    assert not way.server or net.lives > 1
    return ended, members


def run_and_resume(reference: Reference, folder: Path) -> tuple[State, list[Any]]:
    """Kill a run after the first round that it evaluated, and resume it."""
    kill = min(reference.evaluated[0] + 1, reference.rounds - 1)

    def stop(result: Any) -> None:
        if result.round == kill:
            raise KeyboardInterrupt

    job, options = reference.job, {"directory": folder / "checkpoints"}
    with fixed_marks():
        members = job.make_all(folder / "sites")
        with pytest.raises(KeyboardInterrupt):
            job.train(InProcess(members, observer=stop, **options))
        assert any((folder / "checkpoints").iterdir())
        members = job.make_all(folder / "sites")
        return job.train(InProcess(members, resume=True, **options)), members


def resume(job: Job, members: list[Any], checkpoints: Path, **options: Any) -> State:
    """Kill a run after the first round that it evaluates, and resume it."""

    evaluated: list[int] = []

    def stop(result: Any) -> None:
        if evaluated:
            raise KeyboardInterrupt
        if result.evaluated:
            evaluated.append(result.round)

    options["directory"] = checkpoints
    with suppress(KeyboardInterrupt):  # none if the last round alone is evaluated
        job.train(InProcess(job.make_all(), observer=stop, **options))
    assert any(checkpoints.iterdir())
    return job.train(InProcess(members, resume=True, **options))


def run_securely(reference: Reference, folder: Path) -> tuple[State, list[Any]]:
    """Run under the secure sum, with a step of counts; no other bit leaves a site."""
    members = reference.job.make_all(folder / "sites", count_step=COUNT_STEP)
    engine = Recording(members, secure=True)
    ended = reference.job.train(engine)
    check_same_updates(engine, reference.engine)
    return ended, members


def run_in_workers(reference: Reference, folder: Path) -> tuple[State, list[Any]]:
    """Run with sites that are asked by encoded requests."""
    members = reference.job.make_all(folder / "sites")
    return reference.job.train(Simulation(held_in_two(members))), members


PRIVATE_RUNS: dict[str, Callable[[Reference, Path], tuple[State, list[Any]]]] = {
    "secure sum and a step of counts": run_securely,
    "resumed": run_and_resume,
    "worker processes": run_in_workers,
    "restarts": lambda reference, folder: run_with_restarts(
        reference, SITES_EACH_ROUND, folder
    ),
}
WAYS_OF_PRIVATE_RUNS = [
    pytest.param("secure sum and a step of counts", marks=pytest.mark.slow),
    "resumed",
    pytest.param("worker processes", marks=pytest.mark.slow),
    pytest.param("restarts", marks=pytest.mark.slow),
]

Test = TypeVar("Test", bound=Callable[..., None])


def slow_for_further(test: Test) -> Test:
    """Leave further cases of a test to the slow tests."""
    test.is_slow_for_further = True  # type: ignore[attr-defined]
    return test


class MethodContract:
    """Tests of methods.

    Attributes:
        cases: Small jobs by name.
        further: Jobs of the same methods with other settings. The attack that subtracts
            two jobs is tried on them with secret draws only: packed numbers and shared
            batches stop it in any case.
        private: The names of the cases that are also trained with differential privacy.
        never_alone: The names of cases that are no federation of one site, or whose
            sites train something else alone; and why.
    """

    cases: ClassVar[Mapping[str, MakeCase]]
    further: ClassVar[Mapping[str, MakeCase]] = {}
    private: ClassVar[Collection[str]] = ()
    never_alone: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        is_slow = getattr(metafunc.function, "is_slow_for_further", False)
        marks = [pytest.mark.slow] if is_slow else []
        further = [pytest.param(name, marks=marks) for name in self.further]
        for fixture, names in (
            ("reference", [*self.cases, *further]),
            ("private_reference", [*self.private]),
            ("case_name", [*self.cases]),
        ):
            if fixture in metafunc.fixturenames:
                metafunc.parametrize(fixture, names, indirect=True, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def case_name(cls, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def reference(
        cls,
        request: pytest.FixtureRequest,
        bert: Path,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Reference:
        case = {**cls.cases, **cls.further}[request.param](bert)
        folder = tmp_path_factory.mktemp("reference")
        return Reference(request.param, case, Job.of(case), folder)

    @pytest.fixture(scope="class")
    @classmethod
    def private_reference(
        cls,
        request: pytest.FixtureRequest,
        bert: Path,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Reference:
        case = cls.cases[request.param](bert)
        folder = tmp_path_factory.mktemp("private")
        return Reference(request.param, case, Job.with_privacy(case), folder)

    # ---- faults ------------------------------------------------------------------------

    @slow_for_further
    @pytest.mark.parametrize("way", WAYS)
    def test_restarts_do_not_change_the_result(
        self, way: Way, reference: Reference, tmp_path: Path
    ) -> None:
        """A restarted part has only what is on its disk."""
        ended, members = run_with_restarts(reference, way, tmp_path)
        reference.check(ended, members, tmp_path / "sites")

    @slow_for_further
    @pytest.mark.parametrize("seed", SEEDS)
    def test_random_faults_do_not_change_the_result(
        self, seed: int, reference: Reference, tmp_path: Path
    ) -> None:
        """Messages are lost and repeated, sites and the server killed; every site is
        needed."""
        makes = reference.job.makes(tmp_path / "sites")
        net = Net(makes, tmp_path / "net", random.Random(seed), failures_left=2)
        ended, members = run_until_done(net, reference.job)
        reference.check(ended, members, tmp_path / "sites")
        assert net.now > 0

    @slow_for_further
    def test_a_killed_run_resumes_to_the_same_result(
        self, reference: Reference, tmp_path: Path
    ) -> None:
        """In one process, from its checkpoints."""
        ended, members = run_and_resume(reference, tmp_path)
        reference.check(ended, members, tmp_path / "sites")

    @slow_for_further
    @pytest.mark.parametrize("step", FAULTS)
    def test_a_wrong_message_ends_the_run_with_one_error_that_names_it(
        self,
        step: int,
        reference: Reference,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Try every fault of every message (slow), or each twelfth one."""
        (tmp_path / "run").mkdir()
        monkeypatch.chdir(tmp_path / "run")
        first = sum(map(ord, reference.name)) % step  # together they hold all kinds
        outcomes = wrong_messages.try_all(
            reference.case, tmp_path / "copies", step, first
        )
        assert outcomes
        for outcome in outcomes:
            wrong_messages.check(outcome)

    # ---- worker processes --------------------------------------------------------------

    @slow_for_further
    def test_sites_in_worker_processes_compute_the_same_bits(
        self, reference: Reference, tmp_path: Path
    ) -> None:
        """All that goes to sites and from them is encoded, also their states."""
        job = reference.job
        with fixed_marks():
            members = job.make_all(tmp_path / "sites")
            ended = job.train(Simulation(held_in_two(members)))
        reference.check(ended, members, tmp_path / "sites")
        states = held_in_two(members).states()
        for member in members:
            state = member.state()
            assert bits(states[member.id].tensors) == bits(state.tensors)
            assert states[member.id].facts == state.facts

    # ---- rounds for which sites are drawn ----------------------------------------------

    @slow_for_further
    def test_only_drawn_sites_train_in_every_engine(
        self, reference: Reference, tmp_path: Path
    ) -> None:
        """Two of three sites are drawn for each round. The bits of a run in one process
        are those of a run in several, and of a run that was killed and resumed."""
        changes = {"sites_per_round": 2, "weighting": False}
        settings = with_known(reference.job.settings, changes)
        if count_drawn_sites(settings) is None:
            pytest.skip("the method does not draw sites")
        job = replace(reference.job, settings=settings)
        for_all_sites = job.method.site_class.for_all_sites
        options: Any = {"sampling": RoundSampling(2, Draws(4), for_all_sites)}
        with fixed_marks():
            members = job.make_all(tmp_path / "here")
            engine = Recording(members, **options)
            ended = job.train(engine)
            first_task = reference.case.task
            trained = [t.included for task, t in engine.totals if task == first_task]
            assert {len(sites) for sites in trained} == {2}

            there = job.make_all(tmp_path / "there")
            ended_there = job.train(Simulation(held_in_two(there), **options))
            resumed = job.make_all(tmp_path / "resumed")
            ended_resumed = resume(job, resumed, tmp_path / "checkpoints", **options)
        for other, others in ((ended_there, there), (ended_resumed, resumed)):
            assert bits(other.tensors) == bits(ended.tensors)
            for site, member in zip(others, members, strict=True):
                assert bits(site.state().tensors) == bits(member.state().tensors)
                assert site.state().facts == member.state().facts

    # ---- sums --------------------------------------------------------------------------

    def test_a_federation_of_one_site_equals_training_alone(
        self, reference: Reference
    ) -> None:
        """A mean over one site is its value: to the bit, and in its scores."""
        job = reference.job
        if reference.name in self.never_alone:
            pytest.skip(self.never_alone[reference.name])
        site = job.sites[0]
        federated = with_known(reference.case.settings([site]), SETTINGS)
        (alone,) = job.method.configure_alone(federated, [site])
        members = [job.method.make_site(site, each) for each in (federated, alone)]
        from_federation, from_alone = (
            job.method.train(InProcess([member]), settings)
            for member, settings in zip(members, (federated, alone), strict=True)
        )
        assert bits(from_federation.tensors) == bits(from_alone.tensors)
        assert members[0].scores == members[1].scores

    def test_private_parameters_of_a_site_never_leave_it(
        self, reference: Reference
    ) -> None:
        """No message has the name of a private parameter or its final value, although
        training changes them."""
        sent = [update.tensors for _, _, update in reference.engine.sent]
        messages = [*sent, *(tensors for _, tensors in reference.engine.received)]
        messages.append(reference.ended.tensors)
        for number, member in enumerate(reference.members):
            private = copied(getattr(member, "private", {}))
            start = copied(getattr(reference.job.make(number), "private", {}))
            if private:
                assert bits(private) != bits(start)
            for tensors in messages:
                for name, value in tensors.items():
                    assert name.removeprefix("shared.") not in private
                    assert not any(
                        torch.equal(value, private_value)
                        for private_value in private.values()
                    )

    def test_a_secure_sum_equals_the_plain_sum(self, reference: Reference) -> None:
        """Compare each sum with the plain one of the same updates, and the run's end
        with that of a run without the secure sum."""
        job = reference.job
        with fixed_marks():
            engine = Compared(job.make_all())
            ended = job.train(engine)
        check_sums(engine)
        assert {task for task, _, _ in engine.pairs} == set(reference.tasks)
        assert ended.round == reference.ended.round
        assert ended.tensors.keys() == reference.ended.tensors.keys()
        rtol, atol = reference.case.close
        assert_close_facts(ended.facts, reference.ended.facts, max(rtol, atol))
        for name, value in reference.ended.tensors.items():
            torch.testing.assert_close(
                ended.tensors[name], value, rtol=rtol, atol=atol, msg=name
            )
        for member, plain in zip(engine._sites, reference.members, strict=True):
            # A site's part of a batch follows from a sum that is exact.
            assert getattr(member, "share", None) == getattr(plain, "share", None)
            state = member.state().tensors
            assert state.keys() == plain.state().tensors.keys()
            for name, value in plain.state().tensors.items():
                torch.testing.assert_close(
                    state[name], value, rtol=10 * rtol, atol=10 * atol, msg=name
                )

    # ---- what leaves a site ------------------------------------------------------------

    def test_two_jobs_with_the_draws_of_the_job_reveal_a_site(
        self, case_name: str, bert: Path
    ) -> None:
        """`two_jobs.py` has the attack, which the next test tries again."""
        assert remaining(self.cases[case_name](bert), "job") < MOST

    def test_two_jobs_with_secret_draws_do_not_reveal_a_site(
        self, reference: Reference
    ) -> None:
        assert remaining(reference.case, "secret") > reference.case.least_missed

    def test_a_task_that_uses_an_earlier_one_is_bound_to_its_question(
        self, reference: Reference
    ) -> None:
        """Otherwise a lying server gets the earlier task's numbers of one site alone:
        it sends the other sites parameters without gradients for that task."""
        site_class = type(reference.members[0])
        assert site_class.builds_on.keys() <= site_class.tasks
        declared = {
            (task, earlier)
            for task, earlier_tasks in site_class.builds_on.items()
            for earlier in earlier_tasks
        }
        # A site that compresses its update sends it in a second task.
        job = Job.short(reference.case, compression="packed")
        used = find_uses_of_earlier_tasks(job)
        # Sites judge a model that their private parameters belong to; see docs/privacy.md.
        judging = {pair for pair in used if pair[0] in site_class.for_all_sites}
        assert used - judging - declared == set()

    def test_every_count_that_leaves_a_site_is_a_multiple_of_the_step(
        self, reference: Reference
    ) -> None:
        """Counts are observed where an engine receives them, so a new count is found
        without a change here."""
        assert exact_counts(reference.engine)

        with fixed_marks():
            rounded = Recording(reference.job.make_all(count_step=COUNT_STEP))
            reference.job.train(rounded)
        assert {task for _, task, _ in rounded.sent} == set(reference.tasks)
        assert exact_counts(rounded) == set()

    def test_a_count_step_of_one_does_not_change_the_result(
        self, reference: Reference, tmp_path: Path
    ) -> None:
        with fixed_marks():
            engine = Recording(reference.job.make_all(tmp_path, count_step=1))
            ended = reference.job.train(engine)
        reference.check(ended, engine.members, tmp_path)
        check_same_updates(engine, reference.engine)

    # ---- differential privacy ----------------------------------------------------------

    @pytest.mark.parametrize("clip", [0.01, 1e6])
    def test_a_unit_changes_an_answer_by_its_clipped_gradient(
        self, clip: float, private_reference: Reference
    ) -> None:
        """Compute each sum with a unit and without it, in whole numbers: the difference
        is the same whatever the other units are, and is min(C, |g|) long over shared
        and private layers together."""
        site = Job.with_privacy(private_reference.case, clip=clip).make(0)
        units = unit_gradients.find_units(site)
        unit_sum = unit_gradients.sum_units(site, [*units])
        for unit, alone in units.items():
            others = [each for each in units if each != unit]
            without = unit_gradients.sum_units(site, others)
            for name, value in unit_sum.shared.items():
                moved = value - without.shared[name]
                assert torch.equal(moved, alone.shared[name]), name
            for name, value in unit_sum.private.items():
                moved = value - without.private[name]
                bound = 2e-6 * min(clip, 1.0)
                assert float((moved - alone.private[name]).abs().max()) < bound, name
            assert 0 < alone.length <= clip * (1 + 1e-6)
            assert clip > 1 or alone.length == pytest.approx(clip, rel=2e-3)

    def test_an_answer_without_units_has_the_promised_noise(
        self, private_reference: Reference
    ) -> None:
        """χ² of the sum of squares of what leaves, in deviations, p > 1e-4."""
        site = private_reference.job.make(0)
        answer = unit_gradients.answer_with_noise(site)
        numbers = [value.double().numpy().ravel() for value in answer.values()]
        noise = np.concatenate(numbers) / SCALE
        low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(noise))
        assert low < float(noise @ noise) < high

    def test_only_noisy_integers_leave_a_site_under_differential_privacy(
        self, private_reference: Reference
    ) -> None:
        """Weights are the constant 1, and there are no metrics."""
        assert private_reference.engine.sent
        for _, task, update in private_reference.engine.sent:
            assert task in (NOISY, "finish")
            assert update.weight == 1
            assert update.metrics == {}
            assert (task == NOISY) == bool(update.tensors)
            assert all(value.dtype == torch.int64 for value in update.tensors.values())

    @pytest.mark.parametrize("way", WAYS_OF_PRIVATE_RUNS)
    def test_faults_and_secure_sums_do_not_change_a_run_with_differential_privacy(
        self, way: str, private_reference: Reference, tmp_path: Path
    ) -> None:
        """Whole numbers add exactly in any sum, and a repeated answer has the same
        noise."""
        ended, members = PRIVATE_RUNS[way](private_reference, tmp_path)
        private_reference.check(ended, members, tmp_path / "sites")


def check_same_updates(engine: Recording, reference: Recording) -> None:
    """Assert that all that left the sites of two runs has the same bits."""
    for (site, task, sent), (same_site, same_task, expected) in zip(
        engine.sent, reference.sent, strict=True
    ):
        assert (site, task) == (same_site, same_task)
        assert sent.weight == expected.weight
        assert sent.metrics == expected.metrics
        assert bits(sent.tensors) == bits(expected.tensors)


# ---- counts ------------------------------------------------------------------------------

SUMS = {"loss", "source", "target"}  # of a loss over examples
# 0 or 1: whether, or for which tags, a site adds anything
FLAGS = {"contributing", "counted"}
# of reported counts; tests of equations have the numbers
DERIVED = {"share", "part"}


def is_whole(values: np.ndarray) -> bool:
    """Return whether an array can be one of counts: whole numbers, not only 0 and 1."""
    if not np.isfinite(values).all():
        return False
    return bool((values == np.round(values)).all() and (np.abs(values) > 1).any())


def exact_counts(engine: Recording) -> set[tuple[str, str]]:
    """Return where numbers left that can be counts and are no multiples of the step.

    Returns:
        Pairs of a task and a name.
    """
    places = set()
    for _, task, update in engine.sent:
        numbers = {name: np.array([value]) for name, value in update.metrics.items()}
        if update.weight != 1:
            numbers["weight"] = np.array([update.weight])
        # changes in a code of whole numbers
        tensors = {} if task == "send" else update.tensors
        for name, value in tensors.items():
            if name.endswith(".marks"):  # random numbers that say which rows are read
                continue
            array = value.double().numpy()
            if name == "sums":
                # of Platt scaling: columns 6 and 7 are numbers of patients
                numbers[name] = array[:, 6:8]
            elif is_whole(array):
                numbers[name] = array
        for name in numbers.keys() - SUMS - FLAGS - DERIVED:
            if (numbers[name] % COUNT_STEP != 0).any():
                places.add((task, name))
    return places
