"""The manifest for Kubernetes is what JobSet's API takes; no cluster is asked, and nothing runs."""

from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from tests.examples.commands import REPOSITORY

MANIFEST = REPOSITORY / "examples" / "kubernetes" / "elastic_jobset.yaml"


def manifest() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return found


def as_understood(told: dict[str, Any]) -> dict[str, Any]:
    """Return what the API's models make of a manifest; they leave out what they do not know."""
    understood = JobsetV1alpha2JobSet.from_dict(told)
    assert understood is not None
    found: dict[str, Any] = understood.to_dict()
    return found


def pods() -> list[dict[str, Any]]:
    jobs = manifest()["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]["spec"] for job in jobs]


def test_the_api_knows_every_field_and_type() -> None:
    assert as_understood(manifest()) == manifest()


def test_a_field_that_the_api_does_not_know_is_noticed() -> None:
    told = manifest()
    told["spec"]["replicatedJobs"][1]["template"]["spec"]["backofLimit"] = 1
    assert as_understood(told) != told


def test_a_field_of_another_type_is_noticed() -> None:
    told = manifest()
    told["spec"]["failurePolicy"]["maxRestarts"] = "ten"
    with pytest.raises(ValueError, match="valid integer"):
        as_understood(told)


def test_ranks_meet_at_the_first_pod_by_the_name_that_jobset_gives_it() -> None:
    told = manifest()
    name, first = told["metadata"]["name"], told["spec"]["replicatedJobs"][0]["name"]
    for pod in pods():
        [container] = pod["containers"]
        assert f"--rdzv-endpoint={name}-{first}-0-0.{name}:29400" in container["command"]


def test_volumes_that_are_mounted_are_there() -> None:
    for pod in pods():
        [container] = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_most_pods_are_as_many_as_torchrun_takes() -> None:
    jobs = manifest()["spec"]["replicatedJobs"]
    most = sum(job["replicas"] * job["template"]["spec"]["parallelism"] for job in jobs)
    for pod in pods():
        assert f"--nnodes=1:{most}" in pod["containers"][0]["command"]
