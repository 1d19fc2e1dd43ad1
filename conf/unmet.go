package conf

import (
	"fmt"
	"path/filepath"
	"slices"
)

// Unmet lists what c needs of CRI-O, as [DropIn] has it, and crio has not.
func Unmet(c Config, crio *CRIO) []string {
	var unmet []string
	if crio.InternalRepair {
		unmet = append(unmet, "internal_repair is on: CRI-O may delete what keeps images in use, and wipe its root after it was killed")
	}
	if !crio.NRI.Enabled {
		unmet = append(unmet, "NRI is off (enable_nri)")
	} else if crio.NRI.DisableConnections {
		unmet = append(unmet, "NRI takes no plugins from outside (nri_disable_connections)")
	}
	if v := crio.NRI.DefaultValidator; c.NRI.Required && (v == nil || !v.Enable || !slices.Contains(v.RequiredPlugins, c.NRI.PluginName)) {
		unmet = append(unmet, fmt.Sprintf("the validator does not require the plugin %s (nri_validator_required_plugins, from CRI-O 1.34 on)", c.NRI.PluginName))
	}
	if dir := HookDir(c, crio); !slices.Contains(crio.HooksDir, dir) {
		unmet = append(unmet, fmt.Sprintf("hooks_dir has no %s, where the hook file is", dir))
	}
	if c.Volumes.Pin && !slices.Contains(crio.PinnedImages, PinPattern) {
		unmet = append(unmet, fmt.Sprintf("pinned_images has no %s, by which kubelet knows images in use", PinPattern))
	}
	stores := ImageStores(crio.StorageOptions)
	for _, h := range c.Roots() {
		if !slices.Contains(stores, filepath.Clean(h.Root)) {
			unmet = append(unmet, fmt.Sprintf("the root of handler %s, %s, is no additional image store", h.Name, h.Root))
		}
	}
	return unmet
}
