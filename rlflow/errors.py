"""The exception for what the user of a run can mend; it is the bridge's own, so that one handler reports both."""

from megatron_bridge.errors import UserError

__all__ = ["UserError"]
