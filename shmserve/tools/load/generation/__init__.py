"""Generator processes: `process` is their program; `team` starts them and sends them orders (`messages`).

A process opens a target, builds its requests (`request_data`, `prompts`), and sends them at the times of its part of
the `schedule` (`sending`, with a timer that is exact to microseconds). It reports the times of all responses ten times
a second.
"""
