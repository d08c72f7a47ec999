"""`prefect-torch-elastic doctor`: whether gangs could run in a Kubernetes cluster, and what is missing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import cyclopts

from prefect_torch_elastic.cli import FAILED
from prefect_torch_elastic.cli.parameters import Credentials, Json
from prefect_torch_elastic.cli.reading import find_credentials
from prefect_torch_elastic.cli.rendering import print_json, print_lines, print_table
from prefect_torch_elastic.kubernetes.client import Cluster
from prefect_torch_elastic.kubernetes.doctor import Finding, Level, check_cluster, check_store


def doctor(
    *,
    namespace: Annotated[str, cyclopts.Parameter(help="Where gangs are to run.")] = "default",
    queue: Annotated[str | None, cyclopts.Parameter(help="Kueue's LocalQueue of that namespace.")] = None,
    priority: Annotated[str | None, cyclopts.Parameter(help="Kueue's WorkloadPriorityClass.")] = None,
    kubeconfig: Annotated[
        str | None, cyclopts.Parameter(help="File; by default the one that `kubectl` uses here.")
    ] = None,
    context: Annotated[str | None, cyclopts.Parameter(help="Context of the kubeconfig.")] = None,
    store: Annotated[str | None, cyclopts.Parameter(help="URL of the store, to try it as well.")] = None,
    credentials: Credentials = None,
    json: Json = False,
) -> int:
    """Check a Kubernetes cluster under the identity of whoever asks; nothing is created in it."""
    cluster = Cluster.connect(kubeconfig=kubeconfig, context=context)
    try:
        found = check_cluster(cluster, namespace=namespace, queue=queue, priority=priority)
    finally:
        cluster.close()
    if store is not None:
        found.append(check_store(store, credentials=find_credentials(credentials)))
    if json:
        print_json([asdict(finding) for finding in found])
    else:
        _print(found, title=f"Gangs in namespace '{namespace}'")
    return FAILED if any(finding.level is Level.ERROR for finding in found) else 0


def _print(found: list[Finding], *, title: str) -> None:
    rows = [(str(finding.level), finding.subject, finding.text) for finding in found]
    print_table(("Result", "What", "Found"), rows, title=title)
    cures = [f"{finding.level} ({finding.subject}): {finding.cure}" for finding in found if finding.cure]
    print_lines(list(dict.fromkeys(cures)))
