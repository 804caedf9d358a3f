"""No code from data, none from others' configs or models, and no secret in what is written."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from pipeline import run as command_line
from pipeline.command import check_config
from pipeline.report import provenance, table
from pipeline.secrets import MASK, redact, redact_logs
from pipeline.trust import check_trust, stage_function
from tests.conftest import tiny_llama, word_tokenizer
from tests.fuzzing import Touch
from treegraft_core import InputError, StageError, load_pair

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "hf_aVerySecretToken42"
KEY = "wJalr/XUtn+FEMI=K7"


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """A file that is there only if something was executed."""
    return tmp_path / "proof"


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line's own function; return its status."""
    monkeypatch.setattr(sys, "argv", ["pipeline.run", *arguments])
    try:
        return command_line.main()
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def one_error(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the only error line of stderr."""
    printed = capfd.readouterr()
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), printed.err
    return lines[0]


# Configurations -----------------------------------------------------------------------------------

REFUSED = {
    "a function elsewhere": {"stage": {"run": {"_target_": "os.system"}}},
    "through an import of a stage": {"stage": {"run": {"_target_": "pipeline.report.os.system"}}},
    "beside the stages": {"pair": {"extra": {"_target_": "os.system"}}},
    "in a list": {"replay": {"policies": [{"a": {"_target_": "os.system"}}]}},
    "an interpolated name": {"x": "os.system", "stage": {"run": {"_target_": "${x}"}}},
    "a callback": {"hydra": {"callbacks": {"a": {"_target_": "os.system"}}}},
    "a group made from a text": {"hydra": {"callbacks": "${oc.create:'{a: 1}'}"}},
    "a resolver in a resolver": {"x": "decode", "y": "${oc.${x}:'{_target_: os.system}'}"},
    "quoted braces": {"x": '${oc.decode:"{_target_: os.system}"}'},
    "a launcher": {"hydra": {"launcher": {"_target_": "os.system"}}},
    "a sweeper": {"hydra": {"sweeper": {"_target_": "subprocess.run"}}},
    "a class of logging": {"hydra": {"job_logging": {"handlers": {"a": {"class": "os.system"}}}}},
    "a factory": {"hydra": {"job_logging": {"handlers": {"a": {"()": "os.system"}}}}},
    "an import": {"hydra": {"job_logging": {"handlers": {"a": {"stream": "ext://os.environ"}}}}},
    "a log elsewhere": {"hydra": {"hydra_logging": {"handlers": {"a": {"filename": "/etc/x"}}}}},
    "the environment": {"hydra": {"job": {"env_set": {"LD_PRELOAD": "x.so"}}}},
    "a search path": {"hydra": {"searchpath": ["pkg://evil"]}},
    "a sweep over logging": {"hydra": {"sweeper": {"params": {"+hydra.job_logging.a": "b"}}}},
}
"""What an experiment file from someone else could try."""


def experiment(folder: Path, values: Any) -> list[str]:
    """Write an experiment; return the arguments that run it."""
    path = folder / "configs" / "experiment" / "theirs.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{OmegaConf.to_yaml(OmegaConf.create(values))}")
    return [f"--config-dir={folder / 'configs'}", "stage=report", "experiment=theirs"]


@pytest.mark.parametrize("what", REFUSED)
def test_configs_of_others_run_nothing(tmp_path: Path, what: str) -> None:
    with pytest.raises(InputError) as error:
        check_config(experiment(tmp_path, REFUSED[what]))
    assert len(str(error.value).splitlines()) == 1


def test_an_experiment_of_ones_own(tmp_path: Path) -> None:
    sweep = {"mode": "MULTIRUN", "sweeper": {"params": {"seed": "0,1"}}}
    levels = {"job_logging": {"root": {"level": "DEBUG"}}}
    check_config(experiment(tmp_path, {"seed": 3, "hydra": sweep | levels}))
    with pytest.raises(InputError, match=r"collect\.batch=many: must be a whole number"):
        check_config(experiment(tmp_path, {"collect": {"batch": "many"}}))


FLAGS = {
    "--experimental-rerun=job.pickle": "reads a pickle",
    "--exp=job.pickle": "reads a pickle",
    "--config-name=theirs": "--config-dir DIR",
    "-cp=/tmp": "--config-dir DIR",
    "--config-dir=/nowhere": "no such folder",
    "hydra.searchpath=[pkg://evil]": "--config-dir DIR",
    "+hydra.callbacks.a._target_=os.system": "no such config key",
    "stage.run._target_=os.system": "no stage of this project",
    "hydra.launcher._target_=os.system": "only installed plugins",
}


@pytest.mark.parametrize("flag", FLAGS)
def test_command_lines_that_would_run_code(
    flag: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, flag, "stage=report") == 2
    assert FLAGS[flag] in one_error(capfd)


def test_lightning_starts_processes_with_these() -> None:
    """What it appends to the command line for strategies of several processes."""
    check_config(
        [
            "stage=report",
            'hydra.run.dir="."',
            "hydra.job.name=train_ddp_process_1",
            "hydra.output_subdir=null",
        ]
    )


def test_every_job_of_a_sweep_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job's configuration exists only during the sweep, so nothing before can check it."""
    handlers = {"console": {"()": "os.system", "command": f"touch {tmp_path / 'proof'}"}}
    values = {"hydra": {"job_logging": {"handlers": handlers}}}
    flag = experiment(tmp_path, values)[0]
    (tmp_path / "configs" / "experiment" / "good.yaml").write_text("# @package _global_\nseed: 1\n")
    data = [f"paths.data={tmp_path / 'data'}", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    arguments = [flag, "-m", "stage=report", *data, "experiment=theirs,good"]
    assert main(monkeypatch, *arguments) == 2
    assert "not allowed in logging" in one_error(capfd)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("flag", ["--help", "--cfg=job", "--cfg=hydra"])
def test_printing_a_config_runs_nothing_either(
    tmp_path: Path, flag: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = {"console": {"()": "os.system", "command": f"touch {tmp_path / 'proof'}"}}
    arguments = experiment(tmp_path, {"hydra": {"hydra_logging": {"handlers": handlers}}})
    assert main(monkeypatch, flag, *arguments) == 2
    assert "not allowed in logging" in one_error(capfd)
    assert not (tmp_path / "proof").exists()


def test_help_without_a_stage(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "--help") == 2
    assert "stage: missing; give one" in one_error(capfd)


@pytest.mark.parametrize(
    "target",
    ["pipeline.report.subprocess", "pipeline.nowhere.run", "pipeline.run", "os.system", "", 3],
)
def test_only_functions_of_the_project_are_stages(target: Any) -> None:
    with pytest.raises(InputError, match="no stage of this project"):
        stage_function(target)


def test_the_projects_own_configs_pass() -> None:
    for path in sorted((command_line.CONF / "stage").glob("*.yaml")):
        conf = OmegaConf.load(path)
        assert callable(stage_function(conf.run._target_))
        check_trust(OmegaConf.create({"stage": conf}))


# Models -------------------------------------------------------------------------------------------

SPY = """
from pathlib import Path
Path({proof!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class TheirConfig(LlamaConfig):
    model_type = "theirs"
class TheirModel(LlamaForCausalLM):
    config_class = TheirConfig
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two tiny models on disk, as safetensors."""
    folder = tmp_path / "models"
    for name, seed in (("target", 0), ("mid", 1)):
        tiny_llama(seed).float().save_pretrained(folder / name)
        word_tokenizer().save_pretrained(folder / name)
    return folder


def load(models: Path, **options: Any) -> Any:
    return load_pair(str(models / "target"), str(models / "mid"), dtype="float32", **options)


def with_code(folder: Path, proof: Path) -> None:
    """Make a model one that comes with a Python file."""
    (folder / "theirs.py").write_text(SPY.format(proof=str(proof)))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "theirs",
        "auto_map": {
            "AutoConfig": "theirs.TheirConfig",
            "AutoModelForCausalLM": "theirs.TheirModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("role", ["target", "mid"])
def test_a_models_code_runs_only_when_asked_for(
    models: Path, proof: Path, role: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    with_code(models / role, proof)
    with pytest.raises(InputError, match=r"engine\.trust_remote_code=true"):
        load(models)
    assert not proof.exists()
    load(models, trust_remote_code=True)
    assert proof.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
def test_pickled_weights_are_not_read(models: Path, proof: Path, name: str) -> None:
    (models / "mid" / "model.safetensors").unlink()
    torch.save(Touch(proof), models / "mid" / name)
    with pytest.raises(InputError, match=rf"{name} is a pickle.*safetensors"):
        load(models)
    shutil.copy(models / "mid" / name, models / "mid" / "model.safetensors")
    with pytest.raises(InputError, match=r"pair\.mid\.path"):
        load(models)
    assert not proof.exists()


# Secrets ------------------------------------------------------------------------------------------


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("HF_TOKEN", TOKEN),
        ("AWS_SECRET_ACCESS_KEY", KEY),
        ("SHORT_TOKEN", "data"),
        ("WANDB_API_KEY", "0123456789abcdef"),
    ):
        monkeypatch.setenv(name, value)


MASKED = {
    f"cannot reach hub with {TOKEN}.": f"cannot reach hub with {MASK}.",
    "s3://AKIA:wJalr/XUtn@bucket/data": f"s3://{MASK}@bucket/data",
    "https://user:pass@host:80/x?a=1": f"https://{MASK}@host:80/x?a=1",
    "https://h/x?X-Amz-Signature=abc&n=1": f"https://h/x?X-Amz-Signature={MASK}&n=1",
    "https://h/x?sv=1&sig=abc%2F": f"https://h/x?sv=1&sig={MASK}",
    "python -m pipeline.run tracker.api_key=abc seed=1": (
        f"python -m pipeline.run tracker.api_key={MASK} seed=1"
    ),
    "wJalr%2FXUtn%2BFEMI%3DK7": MASK,
    "Authorization: Bearer abcdefghij": f"Authorization: Bearer {MASK}",
}
KEPT = [
    "data/trajectories is data", "collect.max_new_tokens=40", "hf://datasets/a/b@main",
    "ray://host:10001", "http://host:80/a@b", "x.token=null", "tokens/s", "a@b.c", "bits=10101",
]  # fmt: skip


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("text", MASKED)
def test_secrets_in_texts(text: str) -> None:
    assert redact(text) == MASKED[text] and redact(redact(text)) == MASKED[text]


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.usefixtures("secrets")
def test_secrets_in_containers() -> None:
    given = {
        "hub_token": "x",
        "password": None,
        "max_tokens": 4,
        "paths": [Path("data"), Path(TOKEN), ("s3://a:b@c", 0.5, True)],
    }
    before = repr(given)
    assert redact(given) == {
        "hub_token": MASK,
        "password": None,
        "max_tokens": 4,
        "paths": [Path("data"), MASK, (f"s3://{MASK}@c", 0.5, True)],
    }
    assert repr(given) == before


@pytest.mark.usefixtures("secrets")
def test_log_records(caplog: pytest.LogCaptureFixture) -> None:
    factory = logging.getLogRecordFactory()
    try:
        redact_logs()
        redact_logs()
        try:
            raise ValueError(f"refused {TOKEN}")
        except ValueError:
            logging.getLogger("another.library").warning("key %s, %d", KEY, 3, exc_info=True)
    finally:
        logging.setLogRecordFactory(factory)
    assert f"key {MASK}, 3" in caplog.text and f"refused {MASK}" in caplog.text
    assert TOKEN not in caplog.text and KEY not in caplog.text


@pytest.mark.usefixtures("secrets")
def test_provenance_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", f"task.path={TOKEN}", "paths.data=s3://a:b@c/d"])
    conf = OmegaConf.create({"pair": {"name": "tiny"}, "url": "s3://a:b@c/d", "api_key": "k"})
    found = provenance(conf)
    assert found["config"] == {"pair": {"name": "tiny"}, "url": f"s3://{MASK}@c/d", "api_key": MASK}
    assert TOKEN not in str(found) and "a:b" not in str(found["command"])
    assert TOKEN not in table([{"source": f"of {TOKEN}"}], TOKEN)


@pytest.mark.usefixtures("secrets")
def test_the_tracker_gets_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, in all that W&B writes offline, its own record of the run included."""
    from pipeline.report import stage_run

    monkeypatch.setattr(sys, "argv", ["pipeline.run", f"task.path={TOKEN}"])
    conf = OmegaConf.create(
        {
            "pair": {"name": "tiny"},
            "task": {"name": "math", "path": f"s3://{KEY}:{TOKEN}@bucket"},
            "tracker": {"mode": "offline", "project": "x", "folder": str(tmp_path / "wandb")},
        }
    )
    with stage_run(conf, "report", tmp_path / "out") as stage:
        stage.read(f"s3://a:{TOKEN}@bucket/x")
        stage.show(f"of {TOKEN}", [{"policy": TOKEN, "η": 0.5}])
        stage.metrics["source"] = TOKEN
        stage.log({"loss": 0.5})
        stage.write_tables()
        print(TOKEN)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    for path in written:
        data = path.read_bytes()
        assert TOKEN.encode() not in data and KEY.encode() not in data, path


@pytest.mark.usefixtures("secrets")
def test_a_sweep_saves_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hydra keeps the configuration of a sweep in a file of its own."""
    seen = []
    monkeypatch.setattr("pipeline.command.stage_function", lambda _: lambda c: seen.append(c.seed))
    places = [f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=."]
    secret = f"paths.data=s3://a:{TOKEN}@bucket"
    assert main(monkeypatch, "-m", "stage=report", *places, secret, "seed=1,2") == 0
    assert seen == [1, 2]
    text = (tmp_path / "multirun.yaml").read_text()
    assert f"s3://{MASK}@bucket" in text and TOKEN not in text
    with pytest.raises(InputError, match=r"hydra\.output_subdir"):
        check_config(["stage=report", "hydra.output_subdir=.hydra"])


# How a run ends -----------------------------------------------------------------------------------


def raised(error: BaseException) -> Callable[[Any], None]:
    def run(_: Any) -> None:
        raise error

    return run


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (InputError(f"seed: bad\n{TOKEN}\x1b[2J"), 2, f"error: seed: bad {MASK}\\x1b[2J"),
        (StageError("2 prompts failed;\nrun it again"), 1, "error: 2 prompts failed; run it again"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: x: Permission denied"),
        (KeyboardInterrupt(), 130, "stopped; what was written stays"),
        (SystemExit(143), 143, ""),
        (SystemExit(75), 75, ""),
    ],
)
def test_statuses(
    error: BaseException,
    status: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("pipeline.command.stage_function", lambda _: raised(error))
    assert main(monkeypatch, "stage=report", "tracker=disabled") == status
    printed = capfd.readouterr().err
    assert says in printed and "Traceback" not in printed and TOKEN not in printed
    assert len(printed.strip().splitlines()) == bool(says)


@pytest.mark.usefixtures("secrets")
def test_a_fault_of_the_project_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fault = raised(ZeroDivisionError(f"by {TOKEN}"))
    monkeypatch.setattr("pipeline.command.stage_function", lambda _: fault)
    assert main(monkeypatch, "stage=report", "tracker=disabled") == 1
    printed = capfd.readouterr().err
    assert "Traceback" in printed and f"ZeroDivisionError: by {MASK}" in printed


def test_interrupted_while_importing() -> None:
    """Ctrl-C in the seconds before a stage starts is quiet too."""
    code = (
        "import sys, builtins; real = builtins.__import__\n"
        "def slow(name, *rest):\n"
        "    if name == 'torch': raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = slow\n"
        "from pipeline.run import main\n"
        "sys.exit(main())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, "stage=report"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert found.returncode == 130 and "Traceback" not in found.stderr, found.stderr


def test_no_pickle_is_read_anywhere() -> None:
    """By the source: no unpickling, no evaluation, and torch reads weights alone."""
    banned = ("pickle.load", "import pickle", "joblib.load", "np.load(", "allow_pickle=True")
    banned += ("weights_only=False", "yaml.load(", "yaml.unsafe_load", " eval(", " exec(")
    for folder in ("pipeline", "treegraft_core"):
        for path in sorted((ROOT / folder).glob("*.py")):
            text = path.read_text()
            assert not [word for word in banned if word in text], path
            for call in text.split("torch.load(")[1:]:
                assert "weights_only=True" in call[:120], path
