"""The manifests for Kubernetes: each field is one of its API's, and each exit status is mapped as docs/launch.md
says."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.exits import EVICT, FAILED, MISUSED, RETRY, of_signal

FOLDER = Path(__file__).parents[2] / "launch" / "kubernetes"
PREEMPTED = of_signal(signal.SIGTERM)

FIELDS = yaml.safe_load(Path(__file__).with_name("kubernetes_fields.yaml").read_text())


def problems(value: object, schema: Any, where: str = "") -> list[str]:
    """Return what is wrong with a manifest."""
    if isinstance(schema, dict) and isinstance(value, dict):
        known = {name.rstrip("*"): inner for name, inner in schema.items()}
        missing = [f"{where}.{name[:-1]} is missing" for name in schema if name[-1] == "*" and name[:-1] not in value]
        found = [f"{where}.{name} is no field" for name in value if name not in known]
        inner = [problems(each, known[name], f"{where}.{name}") for name, each in value.items() if name in known]
        return [*missing, *found, *(each for part in inner for each in part)]
    if isinstance(schema, list) and isinstance(value, list):
        return [each for number, part in enumerate(value) for each in problems(part, schema[0], f"{where}[{number}]")]
    if not isinstance(schema, str):
        holds = False
    elif schema.startswith("/"):
        holds = isinstance(value, str) and re.fullmatch(schema[1:-1], value) is not None
    else:
        holds = value in schema.split("|") if "|" in schema else type(value).__name__ == schema
    return [] if holds else [f"{where} is {value!r}"]


def manifest(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize(
    ("name", "kind"), [("jobset.yaml", "JobSet"), ("elastic.yaml", "JobSet"), ("pytorchjob.yaml", "PyTorchJob")]
)
def test_each_field_is_one_of_the_api(name: str, kind: str) -> None:
    assert problems(manifest(name), FIELDS[kind]) == []


def verdict(name: str, status: int, condition: str | None = None) -> str:
    """Return what a JobSet does after a pod of its first job has ended, as Kubernetes and its controller follow the
    first rule."""
    spec = manifest(name)["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        if "onExitCodes" in rule:
            hit, what = status in rule["onExitCodes"]["values"], f"Container megacore failed with exit code {status}"
        else:
            hit = any(each["type"] == condition for each in rule["onPodConditions"])
            what = f"Pod has condition {condition}"
        if hit:
            if rule["action"] == "FailJob":
                reason, message = "PodFailurePolicy", f"{what} matching FailJob rule at index {index}"
            break
    assert job["backoffLimit"] == 0
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(each, message) for each in patterns):
            return str(rule["action"])
    return "RestartJobSet"


@pytest.mark.parametrize("name", ["jobset.yaml", "elastic.yaml"])
@pytest.mark.parametrize(
    ("status", "condition", "action"),
    [
        (FAILED, None, "FailJobSet"),
        (MISUSED, None, "FailJobSet"),
        (RETRY, None, "RestartJobSet"),
        (EVICT, None, "RestartJobSet"),
        (137, None, "RestartJobSet"),
        (PREEMPTED, None, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, "DisruptionTarget", "RestartJobSetAndIgnoreMaxRestarts"),
    ],
)
def test_a_jobset_restarts_what_a_retry_mends(name: str, status: int, condition: str | None, action: str) -> None:
    assert verdict(name, status, condition) == action


def test_nodes_that_leave_come_again_beside_the_one_that_leads() -> None:
    spec = manifest("elastic.yaml")["spec"]
    lead, nodes = (job["template"]["spec"] for job in spec["replicatedJobs"])
    given = [
        {each["name"]: each.get("value") for each in job["template"]["spec"]["containers"][0]["env"]}
        for job in (lead, nodes)
    ]
    name = manifest("elastic.yaml")["metadata"]["name"]
    assert [each.pop("NODE_RANK") for each in given] == ["0", "1"] and given[0] == given[1]
    assert given[0]["MASTER_ADDR"] == f"{name}-lead-0-0.{spec['network']['subdomain']}"
    assert given[0]["NNODES"] == f"2:{lead['completions'] + nodes['completions']}"
    rules = nodes["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"Ignore"} and rules[1]["onExitCodes"]["values"] == [RETRY, PREEMPTED]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["lead"]
    assert all(rule["targetReplicatedJobs"] == ["lead"] for rule in spec["failurePolicy"]["rules"])


def test_nodes_find_each_other_and_have_time_to_save() -> None:
    spec = manifest("jobset.yaml")["spec"]
    (job,) = spec["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    given = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    name = manifest("jobset.yaml")["metadata"]["name"]
    assert given["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{spec['network']['subdomain']}"
    assert int(given["NNODES"]) == job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"]
    assert int(given["SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    replicas = manifest("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    nodes = sum(each["replicas"] for each in replicas.values())
    for each in replicas.values():
        given = {one["name"]: one.get("value") for one in each["template"]["spec"]["containers"][0]["env"]}
        assert int(given["NNODES"]) == nodes and of_signal(signal.SIGTERM) == int(given["RETRY_AS"])


# -- what runs in each pod


def node(folder: Path, trainer: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    for name, text in {"megacore": trainer, "kubectl": f'echo "$@" >>{folder}/asked'}.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "NODE_NAME": "n7", **variables}
    return subprocess.Popen(["bash", str(FOLDER / "node.sh"), *(arguments or ("recipe", "a b"))], env=environment)


@pytest.mark.parametrize(
    ("status", "variables", "told"),
    [(0, {}, 0), (2, {}, 2), (75, {}, 75), (76, {}, 76), (75, {"RETRY_AS": "143"}, 143), (2, {"RETRY_AS": "143"}, 2)],
)
def test_a_pod_ends_as_its_run_has(tmp_path: Path, status: int, variables: dict[str, str], told: int) -> None:
    ended = node(tmp_path, f'[[ "$*" == "train recipe a b" ]] && exit {status}', **variables)
    assert ended.wait(timeout=20) == told
    assert (tmp_path / "asked").exists() == (status == EVICT)
    if status == EVICT:
        assert (tmp_path / "asked").read_text() == "cordon n7\n"


@pytest.mark.parametrize(("left", "told"), [(75, PREEMPTED), (0, 0), (1, PREEMPTED)])
def test_a_pod_whose_run_another_pod_has_ended_is_not_done(tmp_path: Path, left: int, told: int) -> None:
    """Its ranks end with 0, after the step after which all do; where its status cannot be read, it is tried again."""
    script = f'case "$*" in "train "*) exit 0 ;; "status /shared/run --done") exit {left} ;; esac; exit 3'
    assert node(tmp_path, script, "recipe", "out=/elsewhere", "out=/shared/run").wait(timeout=20) == told


def test_a_pod_passes_the_notice_on_and_waits(tmp_path: Path) -> None:
    trap = f"trap 'echo asked >{tmp_path}/heard; sleep 0.3; exit 143' TERM"
    started = node(tmp_path, f"{trap}; touch {tmp_path}/ready; while :; do sleep 0.05; done")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)
    assert started.wait(timeout=20) == PREEMPTED and (tmp_path / "heard").exists()
