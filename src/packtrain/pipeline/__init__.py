"""The verbs as functions: measure, plan, and the main job that runs them all."""
