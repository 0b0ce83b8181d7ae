"""The commands: each reads its options, asks the house, and prints."""
