"""The manifests in deploy/: jobs and pods validated against the schemas of Kubernetes, and their exit codes."""

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

import variable_batch_size as vbs

DEPLOY = Path(__file__).parent.parent / "deploy"
JOBSETS = sorted(DEPLOY.glob("*-jobset.yaml"))
KUBERNETES = "1.31"

by_jobset = pytest.mark.parametrize("path", JOBSETS, ids=lambda path: path.stem)


def jobs_of(path):
    """The jobs of a JobSet, each as a Kubernetes object, and its pods."""
    for replicated in yaml.safe_load(path.read_text())["spec"]["replicatedJobs"]:
        job = replicated["template"]
        name = {"name": replicated["name"]}
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": name, **job}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": name, **job["spec"]["template"]}


@by_jobset
def test_jobs_and_pods_match_the_schemas_of_kubernetes(path):
    for resource in jobs_of(path):
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)


@by_jobset
def test_unknown_kubernetes_field_is_detected(path):
    for resource in jobs_of(path):
        wrong = copy.deepcopy(resource)
        wrong["spec"]["restartPolicies"] = "Never"
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@by_jobset
def test_stopped_run_is_restarted_without_counting_as_a_failure(path):
    jobset = yaml.safe_load(path.read_text())["spec"]
    (job,) = [
        one["template"]["spec"] for one in jobset["replicatedJobs"] if "podFailurePolicy" in one["template"]["spec"]
    ]
    rule = job["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["values"] == [vbs.EXIT_STOPPED]
    assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # otherwise Kubernetes does not evaluate the policy
    if rule["action"] == "FailJob":
        (again,) = jobset["failurePolicy"]["rules"]
        assert again["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        assert again["onJobFailureReasons"] == ["PodFailurePolicy"]
    else:
        assert rule["action"] == "Ignore"


def test_machines_connect_to_the_pod_of_the_store():
    jobset = yaml.safe_load((DEPLOY / "elastic-jobset.yaml").read_text())
    store, machines = (one["template"]["spec"]["template"]["spec"] for one in jobset["spec"]["replicatedJobs"])
    port = store["containers"][0]["command"][-1]
    name = jobset["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-store-0-0.{name}:{port}" in machines["containers"][0]["command"]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["machines"]


def test_skypilot_task_is_valid_and_its_commands_are_shell():
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "setup", "run"}
    assert set(task["resources"]) == {"accelerators", "use_spot", "job_recovery"}
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [vbs.EXIT_STOPPED]
    assert set(re.findall(r"\$(SKYPILOT_\w+)", task["run"])) == {
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_GPUS_PER_NODE",
        "SKYPILOT_NODE_IPS",
    }
    for command in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", command], check=True)


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.stem)
def test_manifest_states_that_it_was_not_run(path):
    assert re.search(r"not run on a cl(uster|oud)", path.read_text(), re.IGNORECASE)


def test_the_patch_in_the_documentation_resizes_the_job_within_its_range():
    (line,) = re.findall(r"^kubectl patch job .*$", (DEPLOY.parent / "docs" / "spot.md").read_text(), re.MULTILINE)
    words = shlex.split(line)
    jobset = yaml.safe_load((DEPLOY / "elastic-jobset.yaml").read_text())
    assert words[3:5] == [f"{jobset['metadata']['name']}-machines-0", "--type=merge"]  # JobSet names its jobs so
    patch = json.loads(words[words.index("--patch") + 1])
    job = list(jobs_of(DEPLOY / "elastic-jobset.yaml"))[2]
    assert set(patch) == {"spec"}
    assert patch["spec"].keys() <= job["spec"].keys()
    job["spec"] |= patch["spec"]
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    # the condition under which the number of completions may change
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    (nodes,) = [word for word in job["spec"]["template"]["spec"]["containers"][0]["command"] if "--nnodes" in word]
    least, most = map(int, nodes.removeprefix("--nnodes=").split(":"))
    assert least <= job["spec"]["parallelism"] <= most
