"""The ranks in the toolbar and in a sidebar of JupyterLab and Notebook 7."""
