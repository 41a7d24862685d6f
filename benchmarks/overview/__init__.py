"""All cells compared with their fastest peers.

``groups`` reads the results, ``text`` has their Markdown, and ``picture`` draws them.
"""

from overview import picture as picture
from overview import text as text
from overview.comparison import groups as groups
from overview.comparison import of_document as of_document
