"""Plans as values: lengths, spec, plan with ledger and certificate, alignment, epoch order. No torch."""
