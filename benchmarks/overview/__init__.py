"""All cells beside their fastest peers: which are slower, and when that was measured.

``rows`` reads the results, ``text`` writes the block ``overview`` of the report, ``draw`` its
picture, and ``extract`` the block ``extract`` of the README.
"""

from overview.comparison import Row as Row
from overview.comparison import rows as rows
from overview.picture import draw as draw
from overview.text import extract as extract
from overview.text import text as text

MARKER = "<!-- benchmarks:begin overview -->"
EXTRACT_MARKER = "<!-- benchmarks:begin extract -->"
