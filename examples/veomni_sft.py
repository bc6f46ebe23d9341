"""VeOmni's TextTrainer on packs: its own script with two lines more.

torchrun --nproc_per_node=8 examples/veomni_sft.py train.yaml --train.micro_batch_size 4
"""

from veomni.arguments import VeOmniArguments, parse_args
from veomni.trainer.text_trainer import TextTrainer

from packtrain.hosts.veomni import pack  # packtrain

if __name__ == "__main__":
    trainer = TextTrainer(parse_args(VeOmniArguments))
    pack(trainer)  # packtrain
    trainer.train()
