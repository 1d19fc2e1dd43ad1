package conf

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// hookFile is the configuration of an OCI hook, version 1.0.0
// (oci-hooks(5), containers/common pkg/hooks).
type hookFile struct {
	Version string   `json:"version"`
	Hook    hook     `json:"hook"`
	When    hookWhen `json:"when"`
	Stages  []string `json:"stages"`
}

type hook struct {
	Path string   `json:"path"`
	Args []string `json:"args"`
}

type hookWhen struct {
	Annotations map[string]string `json:"annotations"`
}

// The hook runs for a container whose own or pod's annotations have a key that
// matches; both are regular expressions that may match anywhere. The key
// stands for every form of the annotation, the misspelt ones too, which are the
// guard's to refuse. The value is whatever it is, over any number of lines.
const (
	hookKey   = `^image-volume\.ocihold\.dev(/|$)`
	hookValue = `.*`
)

// HookFile renders the OCI hook file that has CRI-O run the guard for every
// container of a pod with an image volume annotation. CRI-O reads only files
// whose name ends in .json.
func HookFile(c Config) ([]byte, error) {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	err := enc.Encode(hookFile{
		Version: "1.0.0",
		Hook:    hook{Path: c.Hook.Guard, Args: []string{c.Hook.Guard, "--mounts", c.MountsDir()}},
		When:    hookWhen{Annotations: map[string]string{hookKey: hookValue}},
		Stages:  []string{"createRuntime"},
	})
	if err != nil {
		return nil, fmt.Errorf("encode hook file: %w", err)
	}
	return out.Bytes(), nil
}
