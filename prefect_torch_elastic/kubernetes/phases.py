"""The phases of a gang on Kubernetes, by the names that people see."""

from __future__ import annotations

from enum import StrEnum


class GangPhase(StrEnum):
    """Where a gang is between its creation and its end."""

    CREATED = "Created"  # the JobSet is there, nobody has acted on it yet
    UNMANAGED = "Unmanaged"  # it names a queue, and Kueue takes no notice of it
    QUEUED = "Queued"  # it waits for quota
    INADMISSIBLE = "Inadmissible"  # it waits for something that no other gang's end will give
    PROVISIONING = "Provisioning"  # its quota is reserved, an admission check is still open
    ADMITTED = "Admitted"  # it may start, its pods are not there yet
    STARTING = "Starting"  # some of its pods do not run yet
    RUNNING = "Running"  # all of its pods run
    RESTARTING = "Restarting"  # the pods of one attempt go, those of the next one come
    STOPPING = "Stopping"  # an attempt failed for good, or the JobSet is being deleted: its pods end
    PREEMPTED = "Preempted"  # its quota was taken away for a workload that goes first
    REQUEUED = "Requeued"  # its quota was taken away for another reason; it waits again
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DEACTIVATED = "Deactivated"  # Kueue will not admit it again unless somebody switches it on
    GONE = "Gone"  # the JobSet was deleted

    @property
    def is_final(self) -> bool:
        """Whether nothing will come after this phase unless somebody steps in."""
        match self:
            case GangPhase.SUCCEEDED | GangPhase.FAILED | GangPhase.DEACTIVATED | GangPhase.GONE:
                return True
            case _:
                return False

    @property
    def waits(self) -> bool:
        """Whether the gang holds no quota in this phase, so that its time does not count as running."""
        match self:
            case (
                GangPhase.CREATED
                | GangPhase.UNMANAGED
                | GangPhase.QUEUED
                | GangPhase.INADMISSIBLE
                | GangPhase.PROVISIONING
                | GangPhase.PREEMPTED
                | GangPhase.REQUEUED
            ):
                return True
            case _:
                return False
