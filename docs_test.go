package ocihold_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What the pages claim, a test shows: each line of their tables names one, and
// all that are named exist.
func TestPagesNameTests(t *testing.T) {
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	exist := map[string]bool{}
	scripts, err := filepath.Glob("bats/*.bats")
	require.NoError(t, err)
	for _, script := range scripts {
		exist[script] = true
	}
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, found := range declared.FindAllSubmatch(text, -1) {
			exist[string(found[1])] = true
		}
		return err
	}))
	named := regexp.MustCompile("`((?:Test|Fuzz)\\w+|bats/\\w+\\.bats)`")
	for _, page := range []string{"SECURITY.md", "contrib/docs/state.md"} {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		lines := 0
		for line := range strings.Lines(string(text)) {
			tests := named.FindAllStringSubmatch(line, -1)
			for _, test := range tests {
				assert.True(t, exist[test[1]], "%s: there is no %s", page, test[1])
			}
			if strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "|---") && !strings.Contains(line, "| Shown by |") {
				lines++
				assert.NotEmpty(t, tests, "%s: no test shows %q", page, line)
			}
		}
		assert.Greater(t, lines, 10, page)
	}
}
