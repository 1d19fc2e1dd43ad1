package conf

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"path/filepath"
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

// dropInHeader begins every rendered drop-in, by which it is known again.
const dropInHeader = "# What Ocihold needs of CRI-O, rendered by `ocihold config crio`.\n"

// PinPattern is the one of CRI-O's pinned_images that fits images in use; see
// [Volumes].
const PinPattern = "in-use.ocihold.dev/*"

// DropIn renders the file for CRI-O's crio.conf.d: the roots of handlers as
// additional image stores, NRI on and open to plugins, internal_repair off,
// hooks_dir with everything crio has plus HookDir, and, where images in use are
// pinned, pinned_images likewise plus PinPattern. Where crio has the table of
// CRI-O's validator, that is switched on, with its list of required plugins
// likewise.
//
// crio is what is in force without an earlier rendering; see
// [ReadCRIOWithoutDropIn]. As CRI-O adds storage options up, a root that is an
// additional image store already is left out.
func DropIn(c Config, crio *CRIO) ([]byte, error) {
	values := map[string]string{"Header": dropInHeader, "PluginName": c.NRI.PluginName}
	encode := func(name, key string, list []string) error {
		line, err := toml.Marshal(map[string][]string{key: list})
		if err != nil {
			return fmt.Errorf("encode %s: %w", key, err)
		}
		values[name] = string(line)
		return nil
	}
	if err := encode("HooksDir", "hooks_dir", union(crio.HooksDir, HookDir(c, crio))); err != nil {
		return nil, err
	}
	if c.Volumes.Pin {
		if err := encode("PinnedImages", "pinned_images", union(crio.PinnedImages, PinPattern)); err != nil {
			return nil, err
		}
	}
	if c.NRI.Required && crio.NRI.DefaultValidator == nil {
		return nil, errors.New("required in [nri] needs the validator that CRI-O has from 1.34 on: start such a CRI-O first, or remove it")
	}
	if validator := crio.NRI.DefaultValidator; validator != nil {
		plugins := validator.RequiredPlugins
		if c.NRI.Required {
			plugins = union(plugins, c.NRI.PluginName)
		}
		if err := encode("RequiredPlugins", "nri_validator_required_plugins", append([]string{}, plugins...)); err != nil {
			return nil, err
		}
	}
	var stores []string
	inForce := ImageStores(crio.StorageOptions)
	for _, h := range c.Roots() {
		if !slices.Contains(inForce, filepath.Clean(h.Root)) {
			stores = append(stores, imageStoreOption(h.Root))
		}
	}
	if len(stores) > 0 {
		if err := encode("StorageOption", "storage_option", stores); err != nil {
			return nil, err
		}
	}
	var out bytes.Buffer
	if err := dropInTemplate.Execute(&out, values); err != nil {
		return nil, fmt.Errorf("render CRI-O drop-in: %w", err)
	}
	return out.Bytes(), nil
}

// union is the list with the element, which is not added twice.
func union(list []string, element string) []string {
	if slices.Contains(list, element) {
		return list
	}
	return append(slices.Clone(list), element)
}
