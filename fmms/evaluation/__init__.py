"""What a claim about text quality or serving speed needs: statistics, graded or judged answers, serving logs, names.

Each module imports by itself; `import fmms` imports none of them.
"""
