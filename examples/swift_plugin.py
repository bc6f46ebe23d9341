"""The file for `swift sft … --packing true --external_plugins examples/swift_plugin.py`."""

from packtrain.hosts.ms_swift import install

install(samples_per_step="same")
