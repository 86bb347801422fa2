"""The commands that convert, compare and describe model folders; `megatron_bridge.cli` lists them.

Each command is a module with `add_arguments(parser)` and `run(args) -> exit code`. `checkpoint` opens any folder,
`convert` writes any from any; `options` and `grid` are what the commands have in common, `memory` and `progress` what
they spend and say.
"""
