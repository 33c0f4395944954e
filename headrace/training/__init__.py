"""From trajectories to versions: batches, the step, mid-training, re-scoring, checkpoints.

An actor needs one class, `headrace.training.trainer.PolicyTrainer`. Every call blocks, so an actor makes the calls in
one worker thread and its event loop stays free for heartbeats:

    trainer = PolicyTrainer.prepare(config, folder, tokenizer_json=text, traces=lambda: ..., progress=callback)
        resumes from <folder>/checkpoint.safetensors, or makes version 0 (mid-training calls `progress` from the
        worker thread); `trainer.resumed`, `trainer.position` (what `save` was last given), `trainer.version`,
        `trainer.numerics.fingerprint`, `trainer.policy_folder` (config.json, tokenizer.json for engines)
    outcome = trainer.step(manifest, trajectories, scores)
        records keyed by stream sequence, as the manifest names them; `StepOutcome` has the figures of StepDone, or
        `failed` (snake_case reason) and `detail` for StepFailed. Either way `outcome.version` and `state_hash` hold.
        Published manifests are re-executed after a crash by the same call.
    state_hash = trainer.publish(path)         the served bytes as one immutable safetensors file
    trainer.save({"close_seq": ...})           durable checkpoint; only then purge what lies before that position
"""
