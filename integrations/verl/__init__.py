"""BiPACE in verl: `algorithm.adv_estimator=bipace`, and nothing to write.  docs/verl.md tells how to use it.

plugin         what verl loads by itself (entry point group `verl.plugins`): the files below join verl's modules as they
               are imported, and nothing is imported before
estimator      one batch of rows with their turns -> advantages and returns [B, T]
trainer_v1     the trainers of verl's v1, reading rows from TransferQueue
driver_v0      RayPPOTrainer, reading rows from a DataProto
engine         the FSDP engine, keeping hidden states on its log-prob forward
config         configurations of the paper's runs, `+bipace=alfworld_7b`
"""
