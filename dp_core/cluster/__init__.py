"""Clusters: functions of shards and hosts of trainings, in process, in a pool, or on Ray."""
