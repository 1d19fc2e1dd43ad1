package conf

import (
	"bytes"
	_ "embed"
	"fmt"
	"slices"
	"text/template"

	"github.com/BurntSushi/toml"
)

//go:embed dropin.conf.tmpl
var dropInText string

var dropInTemplate = template.Must(template.New("drop-in").Parse(dropInText))

// overrideHooksDir is the directory that containers/common sets aside for
// hook files of the host's own.
const overrideHooksDir = "/etc/containers/oci/hooks.d"

// HookDir returns the directory that the hook file belongs into: the one that
// c names, else the last that CRI-O reads (there, no other file of the same
// name takes precedence), else /etc/containers/oci/hooks.d.
func HookDir(c Config, crio *CRIO) string {
	switch {
	case c.Hook.Dir != "":
		return c.Hook.Dir
	case len(crio.HooksDir) > 0:
		return crio.HooksDir[len(crio.HooksDir)-1]
	default:
		return overrideHooksDir
	}
}

// DropIn renders the file for CRI-O's crio.conf.d: NRI on and open to plugins,
// internal_repair off, and hooks_dir with everything crio has plus HookDir.
// crio is what is in force, with or without an earlier rendering: the outcome
// is the same. Storage options are not in it, as CRI-O adds them up.
func DropIn(c Config, crio *CRIO) ([]byte, error) {
	dirs := slices.Clone(crio.HooksDir)
	if dir := HookDir(c, crio); !slices.Contains(dirs, dir) {
		dirs = append(dirs, dir)
	}
	hooksDir, err := toml.Marshal(map[string][]string{"hooks_dir": dirs})
	if err != nil {
		return nil, fmt.Errorf("encode hooks_dir: %w", err)
	}
	var out bytes.Buffer
	if err := dropInTemplate.Execute(&out, map[string]string{"HooksDir": string(hooksDir)}); err != nil {
		return nil, fmt.Errorf("render CRI-O drop-in: %w", err)
	}
	return out.Bytes(), nil
}
