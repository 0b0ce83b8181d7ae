"""What a model does by shapes alone: its parts are measured, and steps traced on a simulated GPU."""
