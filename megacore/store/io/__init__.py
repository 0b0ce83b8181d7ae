"""Bytes on disks and in object stores: opened, locked, replaced and read without trust."""
