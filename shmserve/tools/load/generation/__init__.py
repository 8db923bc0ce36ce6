"""Generator processes: `process` is their program; `team` starts them and sends them orders (`messages`).

A process builds its requests (`request_data`), opens a target, and sends at the times of its part of the `schedule`
(`sending`, with a timer that is exact to microseconds). It reports the times of all responses ten times a second.
"""
