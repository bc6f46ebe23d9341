"""Plans as values: lengths, spec, the plan with its ledger and certificate, alignment, epoch order. No torch."""
