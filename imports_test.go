// Package ocihold_test holds the table of which part may import which.
package ocihold_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/ocihold/ocihold/"

// mayImport lists, for each part, what it may import of ours besides itself. A
// part is a folder with all below it, except what another line names.
var mayImport = map[string][]string{
	"conf":                        {},
	"storage":                     {},
	"imagevolume":                 {},
	"nriplugin":                   {"imagevolume"},
	"nriplugin/cmd/ocihold":       {"conf", "imagevolume", "nriplugin", "storage"},
	"nriplugin/cmd/ocihold-guard": {"imagevolume/request"},
}

// partOf returns the longest part that pkg is in.
func partOf(pkg string) string {
	part := ""
	for p := range mayImport {
		if within(pkg, p) && len(p) > len(part) {
			part = p
		}
	}
	return part
}

func within(pkg, part string) bool { return pkg == part || strings.HasPrefix(pkg, part+"/") }

func TestImports(t *testing.T) {
	for _, pkg := range packages(t) {
		path, ours := strings.CutPrefix(pkg.ImportPath, module)
		if !ours {
			continue // this test's own
		}
		part := partOf(path)
		require.NotEmpty(t, part, "package %s is in no part", path)
		for _, imported := range pkg.Imports {
			imported, ours := strings.CutPrefix(imported, module)
			if !ours || within(imported, part) && partOf(imported) == part {
				continue
			}
			allowed := false
			for _, p := range mayImport[part] {
				allowed = allowed || within(imported, p) && partOf(imported) == partOf(p)
			}
			assert.True(t, allowed, "%s imports %s", path, imported)
		}
	}
}

type listed struct {
	ImportPath string
	Imports    []string
}

func packages(t *testing.T) []listed {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports",
		"-tags", "containers_image_openpgp exclude_graphdriver_btrfs exclude_graphdriver_devicemapper", "./...")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var all []listed
	for decoder := json.NewDecoder(out); ; {
		var pkg listed
		if err := decoder.Decode(&pkg); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
		all = append(all, pkg)
	}
	require.NoError(t, cmd.Wait())
	require.NotEmpty(t, all)
	return all
}
