"""The laboratory of foretell: validation, training of its networks, emulated networks.

It imports foretell; foretell finds it by name when a command needs it (`foretell.cli.lab_package`).
"""
