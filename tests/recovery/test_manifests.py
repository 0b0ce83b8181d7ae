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

# What a field may hold: a type, the words of an enum, {field: what it may hold} with * for those that must be there, or
# a list of such. Of Kubernetes 1.31 (batch/v1, core/v1), of JobSet v1alpha2 (kubernetes-sigs/jobset, the CRD below
# config/components/crd/bases) and of PyTorchJob v1 (kubeflow/training-operator, release-1.9, manifests/base/crds).
Schema = Any
WORD = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
METADATA: Schema = {"name*": WORD, "namespace": WORD, "labels": dict, "annotations": dict}
CONTAINER: Schema = {
    "name*": WORD,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [{"name*": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath*": str}}}],
    "ports": [{"containerPort*": int, "name": str}],
    "resources": {"limits": dict, "requests": dict},
    "volumeMounts": [{"name*": str, "mountPath*": str}],
}
POD: Schema = {
    "restartPolicy": ("Never", "OnFailure"),
    "serviceAccountName": WORD,
    "terminationGracePeriodSeconds": int,
    "containers*": [CONTAINER],
    "volumes": [
        {
            "name*": WORD,
            "emptyDir": {"medium": ("", "Memory"), "sizeLimit": str},
            "persistentVolumeClaim": {"claimName*": str},
        }
    ],
}
JOB: Schema = {
    "completionMode": ("Indexed", "NonIndexed"),
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules*": [
            {
                "action*": ("FailJob", "FailIndex", "Ignore", "Count"),
                "onExitCodes": {"containerName": str, "operator*": ("In", "NotIn"), "values*": [int]},
                "onPodConditions": [{"type*": str, "status*": ("True", "False", "Unknown")}],
            }
        ]
    },
    "template*": {"metadata": METADATA, "spec*": POD},
}
RESTARTS = ("RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob", "RestartJobAndIgnoreMaxRestarts")
REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy")
JOB_SET: Schema = {
    "apiVersion*": ("jobset.x-k8s.io/v1alpha2",),
    "kind*": ("JobSet",),
    "metadata*": METADATA,
    "spec*": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": WORD},
        "successPolicy": {"operator*": ("All", "Any"), "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
            "rules": [
                {
                    "name*": re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"),
                    "action*": ("FailJobSet", *RESTARTS),
                    "onJobFailureReasons": [REASONS],
                    "onJobFailureMessagePatterns": [str],
                    "targetReplicatedJobs": [str],
                }
            ],
        },
        "replicatedJobs": [{"name*": WORD, "replicas": int, "template*": {"metadata": METADATA, "spec*": JOB}}],
    },
}
REPLICAS: Schema = {
    "replicas": int,
    "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
    "template": {"metadata": METADATA, "spec*": POD},
}
PYTORCH_JOB: Schema = {
    "apiVersion*": ("kubeflow.org/v1",),
    "kind*": ("PyTorchJob",),
    "metadata*": METADATA,
    "spec*": {
        "runPolicy": {"backoffLimit": int, "cleanPodPolicy": ("All", "Running", "None"), "activeDeadlineSeconds": int},
        "pytorchReplicaSpecs*": {"Master": REPLICAS, "Worker": REPLICAS},
        "nprocPerNode": str,
    },
}


def problems(value: object, schema: Schema, where: str = "") -> list[str]:
    """Return what is wrong with a manifest."""
    if isinstance(schema, dict) and isinstance(value, dict):
        known = {name.rstrip("*"): inner for name, inner in schema.items()}
        missing = [f"{where}.{name[:-1]} is missing" for name in schema if name[-1] == "*" and name[:-1] not in value]
        found = [f"{where}.{name} is no field" for name in value if name not in known]
        inner = [problems(each, known[name], f"{where}.{name}") for name, each in value.items() if name in known]
        return [*missing, *found, *(each for part in inner for each in part)]
    if isinstance(schema, list) and isinstance(value, list):
        return [each for number, part in enumerate(value) for each in problems(part, schema[0], f"{where}[{number}]")]
    if isinstance(schema, tuple):
        holds = value in schema
    elif isinstance(schema, re.Pattern):
        holds = isinstance(value, str) and schema.fullmatch(value) is not None
    else:
        holds = isinstance(schema, type) and type(value) is schema
    return [] if holds else [f"{where} is {value!r}"]


def manifest(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize(
    ("name", "schema"), [("jobset.yaml", JOB_SET), ("elastic.yaml", JOB_SET), ("pytorchjob.yaml", PYTORCH_JOB)]
)
def test_each_field_is_one_of_the_api(name: str, schema: Schema) -> None:
    assert problems(manifest(name), schema) == []


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
