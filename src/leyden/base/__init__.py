"""Words and pure mathematics. Imports nothing of Leyden outside this folder and opens no connection."""
