"""stage=collect on a Ray cluster of two nodes: what is lost is done again, and nothing else."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from pipeline import collect
from pipeline.dispatch import stop_on_signals
from pipeline.engines import Lost, open_engine
from pipeline.worker import Refused, Setup
from tests.pipeline.conftest import conf, overrides
from tests.pipeline.datasets import events, part_sums, until, write_place
from tests.processes import CommandLine, Template, send
from tests.test_inputs import GRID, profile
from treegraft_core import InputError, StageError

# Ray reads these when it is imported: only this process's children may join its cluster.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
pytest.importorskip("ray", reason="engine=ray is an extra")

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = 16
SLOW = [
    f"collect.prompts_per_task={PROMPTS}",
    "collect.states_per_turn=0",
    "collect.max_new_tokens=24",
    "collect.batch=2",
    "collect.replay_rounds=0",
    "engine.workers=null",
]
FAST_DEATHS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
}


@pytest.fixture(scope="module")
def place(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("ray"), PROMPTS)


def options(place: Path, name: str, *extra: str) -> list[str]:
    return [
        f"paths.data={place / 'data'}",
        f"paths.trajectories={place / name}",
        f"task.path={place / 'prompts.jsonl'}",
        *SLOW,
        *extra,
    ]


def log_of(place: Path) -> Path:
    return place / "data" / "trajectories" / "meta" / "tiny" / "log.jsonl"


@pytest.fixture(scope="module")
def alone(home: Path, place: Path) -> dict[str, str]:
    """Return the files that this very process collects."""
    collect.run(conf(home, "collect", *options(place, "alone", "engine.workers=0")))
    return part_sums(place / "alone")


class TwoNodes:
    """A cluster of two nodes with a CPU each, on this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "object_store_memory": 80 << 20}
        head = {**node, "include_dashboard": False, "_system_config": FAST_DEATHS}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second = self.cluster.add_node(**node)
        self.address = str(self.cluster.address)

    def kill_second(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes(place: Path) -> Iterator[TwoNodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        there = TwoNodes()
        yield there
        there.cluster.shutdown()


def on(nodes: TwoNodes, *extra: str) -> list[str]:
    return ["engine.runner=ray", f"engine.address={nodes.address}", *extra]


def setup_of(given: DictConfig, place: Path) -> Setup:
    made = profile(verify=GRID).to_dict()
    return Setup(collect.worker_conf(given), made, str(place / "nothing"))


def units_done(place: Path) -> list[dict[str, object]]:
    return [e for e in events(log_of(place)) if e["event"] == "unit_done"]


# Joining -----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["engine.address=somewhere"], "engine.address=somewhere: give null, auto, HOST:PORT"),
        (["engine.address=http://a/b"], "engine.address=http://a/b: give null, auto, HOST:PORT"),
        (["engine.address=127.0.0.1:PORT"], "cannot join that Ray cluster (127.0.0.1:"),
        (["engine.address=ray://127.0.0.1:PORT"], "cannot join that Ray cluster (127.0.0.1:"),
        (["engine.workers=0"], "engine.workers=0: engine=ray needs a whole number from 1"),
    ],
)
def test_what_cannot_be_joined_is_refused(
    home: Path, place: Path, extra: list[str], message: str
) -> None:
    extra = [each.replace("PORT", str(free_port())) for each in extra]
    given = conf(home, "collect", *options(place, "none", "engine.runner=ray", *extra))
    with pytest.raises(InputError) as refused:
        open_engine(given, setup_of(given, place), 1)
    assert message in str(refused.value)


def test_without_ray_the_extra_is_named(
    home: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    given = conf(home, "collect", *options(place, "none", "engine.runner=ray"))
    with pytest.raises(InputError, match=r"engine=ray: .*pip install 'treegraft\[ray\]'"):
        open_engine(given, setup_of(given, place), 1)


def test_a_local_collection_does_not_import_ray(home: Path, place: Path) -> None:
    code = (
        "import sys; from pipeline.command import run_hydra; status = run_hydra(); "
        "assert 'ray' not in sys.modules; sys.exit(status)"
    )
    extra = options(place, "local", "engine.workers=0", "collect.prompts_per_task=1")
    arguments = ["stage=collect", *overrides(home, *extra)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(part_sums(place / "local")) == 1


# Two nodes ---------------------------------------------------------------------------------


def test_a_worker_with_other_sources_is_refused(
    home: Path, place: Path, nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.ray_engine.source_digest", lambda: "another")
    given = conf(home, "collect", *options(place, "none", *on(nodes)))
    with stop_on_signals() as stop:
        engine = open_engine(given, setup_of(given, place), PROMPTS)
        try:
            assert list(engine.workers) == [0, 1]
            engine.start(0)
            # Ray ends a driver at SIGTERM; here it stops the run in order.
            os.kill(os.getpid(), signal.SIGTERM)
            heard: list[object] = []
            until(lambda: bool(heard.extend(engine.wait(1.0)) or heard), "the worker")
        finally:
            engine.close()
    assert stop.signal == signal.SIGTERM
    ((_, message),) = heard  # type: ignore[misc]
    assert isinstance(message, Refused)
    assert "has another version of treegraft" in message.message


def test_a_run_without_room_anywhere_ends(
    home: Path, place: Path, nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.ray_engine.PLACE_S", 1.0)
    extra = [*on(nodes), "engine.threads=64"]
    with pytest.raises(InputError, match=r"engine\.threads=64: no node of the Ray cluster"):
        collect.run(conf(home, "collect", *options(place, "none", *extra)))
    extra += ["engine.workers=1"]
    with pytest.raises(StageError, match=r"no node of the Ray cluster has had room"):
        collect.run(conf(home, "collect", *options(place, "none", *extra)))


def test_an_overdue_worker_is_lost_and_starts_again(
    home: Path, place: Path, nodes: TwoNodes
) -> None:
    given = conf(home, "collect", *options(place, "none", *on(nodes)))
    engine = open_engine(given, setup_of(given, place), 1)
    try:
        engine.start(0)
        engine.end(0)
        heard: list[tuple[int, object]] = []
        until(lambda: bool(heard.extend(engine.wait(1.0)) or heard), "the loss")
        assert isinstance(heard[0][1], Lost)
    finally:
        engine.close()


def test_a_worker_that_stands_still_does_not_hold_the_run(
    home: Path, place: Path, nodes: TwoNodes, alone: dict[str, str]
) -> None:
    stopped: list[int] = []

    def stop_one() -> None:
        def ready() -> list[int]:
            found = [e for e in events(log_of(place)) if e["event"] == "worker_ready"]
            return [int(str(e["where"]).rpartition(":")[2]) for e in found]

        until(lambda: len(ready()) == 2 and bool(units_done(place)), "two workers")
        os.kill(ready()[1], signal.SIGSTOP)
        stopped.append(ready()[1])

    log_of(place).unlink(missing_ok=True)
    watcher = threading.Thread(target=stop_one)
    watcher.start()
    try:
        collect.run(conf(home, "collect", *options(place, "still", *on(nodes))))
    finally:
        watcher.join()
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
    assert part_sums(place / "still") == alone
    assert [e["why"] for e in events(log_of(place)) if e["event"] == "unit_again"] == ["slow"]


def test_driver_and_node_are_killed_and_the_dataset_is_the_same(
    home: Path,
    place: Path,
    nodes: TwoNodes,
    alone: dict[str, str],
    template: Template,
    tmp_path: Path,
) -> None:
    log_of(place).unlink(missing_ok=True)
    arguments = overrides(home, *options(place, "killed", *on(nodes)))
    driver = CommandLine(template, tmp_path, "stage=collect", *arguments)
    until(lambda: len(units_done(place)) >= 2 or driver.poll() is not None, "two units")
    send(driver.pid, signal.SIGKILL)
    assert driver.end().returncode == -signal.SIGKILL, driver.printed()
    first = part_sums(place / "killed")
    assert 2 <= len(first) < len(alone)
    assert first.items() <= alone.items()

    def kill_node() -> None:
        before = len(part_sums(place / "killed"))
        until(lambda: len(part_sums(place / "killed")) >= before + 2, "two more units")
        nodes.kill_second()

    watcher = threading.Thread(target=kill_node)
    watcher.start()
    collect.run(conf(home, "collect", *options(place, "killed", *on(nodes))))
    watcher.join()
    assert part_sums(place / "killed") == alone
    collected = [e["unit"] for e in events(log_of(place)) if e["event"] == "unit_done"]
    assert len(collected) == len(set(collected)) == len(alone)
