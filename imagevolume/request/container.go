package request

import "encoding/json"

// ContainerName returns the name that annotation keys call a container by, from
// the OCI annotations CRI-O gives it: kubelet's label, which is also the name
// that NRI reports, else the name in the CRI metadata. It is "" when neither is
// there.
func ContainerName(oci map[string]string) string {
	if name := oci["io.kubernetes.container.name"]; name != "" {
		return name
	}
	var metadata struct {
		Name string `json:"name"`
	}
	if json.Unmarshal([]byte(oci["io.kubernetes.cri-o.Metadata"]), &metadata) != nil {
		return ""
	}
	return metadata.Name
}
