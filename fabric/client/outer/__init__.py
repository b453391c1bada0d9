"""LocalSGD, DiLoCo and streaming DiLoCo: inner steps on each replica, outer steps of the job."""
