"""The paper's tables, figures and studies. Nothing else imports this room: it can be deleted."""
