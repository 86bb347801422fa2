"""Moves model weights between Hugging Face folders, Megatron-core models and vLLM engines, each byte at most once.

One idea carries all of it. Every weight has a canonical tensor, the Hugging Face one, seen through an N-d view in which
any system's shard is a box. A *layout* maps boxes to places: which rank, which parameter, where in it. A *plan* meets
two layouts and names the cheapest source of every box; it is pure, the same on all ranks, and made without
communication. A *transfer* carries a plan out in capped buckets. Loading, exporting, resharding and syncing into an
engine are the same planner and executor with other layouts:

    arch = load_architecture("Qwen2.5-7B")                      # families: config.json -> Architecture
    actor = MegatronLayout(arch, tp=2, pp=2, dp=2)              # layouts: pure descriptions
    engine = VLLMLayout(arch, tp=4, ranks=(0, 1, 2, 3, 4, 5, 6, 7))

    weights = bind_megatron.bind(model, actor, rank)            # names and shapes checked, live parameters
    load_hf("Qwen2.5-7B", actor, weights, rank=rank)            # checkpoints: each rank reads its bytes only

    make_plan(actor, engine).received_bytes(3)                  # plan: on a laptop, for any number of ranks
    sync = connect(actor, weights, engine, bind_vllm.bind(llm, engine, rank), rank=rank, dtype=torch.bfloat16)
    traffic = sync.run()                                        # execute: after every optimizer step

    export_hf("trained", actor, weights, rank=rank, source="Qwen2.5-7B")

Modules: `families` and `layouts` are data and pure functions; `boxes` is the algebra, `demand` and `meeting` what a
node needs and who holds it, `balance` which of several sends, `plan` who sends what, `streams` in which order;
`placement` chooses where slices lie, `describe` says what a plan moves. `execute` carries it out: `copies` many at
once, with a kernel on GPUs, `exchange` what goes between ranks, `checksum` what arrived, `agreement` what all must have
in common; `worlds` joins the processes of two jobs.

Folders: `files` has safetensors, `distcp` and `torch_archive` Megatron's checkpoints, `folders` what lies beside
weights and how a new folder appears, `contents` what lies in which file of it; `checkpoints` loads from any folder,
`export` writes what ranks hold; `score` makes score models of language models, `prediction` carries along what is no
part of the model. Converting needs no transfer: `fill` makes any window of a target from mapped files, `hf_writer` and
`distcp_writer` write them one after another; `conversion` are the commands, `cli` their table and `command_line`
what they share.

`bind_megatron` and `bind_vllm` find a layout's names in live models and `proof` compares with the engine's own loader;
`compat` is the one place for version differences. Ranks are those of the process group that a transfer runs on. What a
user can mend is raised as `UserError`.
"""

__version__ = "0.1.0"
