"""Steps traced on a simulated GPU: what each rank asks of one, by shapes alone, and how long that would take."""
