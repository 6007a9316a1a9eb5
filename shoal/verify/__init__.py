"""`shoal verify`: a job, made small, under a plan and on one device, compared number by number."""
