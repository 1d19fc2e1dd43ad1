package nriplugin

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/request"
)

func podOf(pod *api.PodSandbox) imagevolume.Pod {
	return imagevolume.Pod{
		ID: pod.GetId(), Namespace: pod.GetNamespace(), Name: pod.GetName(), Handler: pod.GetRuntimeHandler(),
		Annotations: pod.GetAnnotations(), UserNS: userNS(pod),
	}
}

// userNS is where the pod's user namespace is bound. CRI-O binds one for each pod
// that has one.
func userNS(pod *api.PodSandbox) string {
	for _, n := range pod.GetLinux().GetNamespaces() {
		if n.GetType() == "user" {
			return n.GetPath()
		}
	}
	return ""
}

func containerOf(c *api.Container) imagevolume.Container {
	mounts := make(map[string]string, len(c.GetMounts()))
	for _, m := range c.GetMounts() {
		mounts[m.GetDestination()] = m.GetSource()
	}
	return imagevolume.Container{
		ID: c.GetId(), Name: request.ContainerName(c.GetAnnotations()), Mounts: mounts, Natives: natives(c.GetAnnotations()),
	}
}

// volumesAnnotation is CRI-O's list of what the container was asked to have
// mounted, in JSON.
const volumesAnnotation = "io.kubernetes.cri-o.Volumes"

var imageID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// crioVolume is one element of that list.
type crioVolume struct {
	ContainerPath string `json:"container_path"`
	HostPath      string `json:"host_path"`
	Image         struct {
		Image string `json:"image"`
	} `json:"image"`
}

// imageVolumes are those in CRI-O's list that are of an image or an artifact: one
// for each of an artifact's files. CRI-O writes the list: what it does not have, or
// not in this form, is no image volume.
func imageVolumes(annotations map[string]string) []crioVolume {
	var list []crioVolume
	if json.Unmarshal([]byte(annotations[volumesAnnotation]), &list) != nil {
		return nil
	}
	return slices.DeleteFunc(list, func(v crioVolume) bool { return v.Image.Image == "" })
}

// natives are the image volumes that may be of an image.
func natives(annotations map[string]string) []imagevolume.Native {
	var found []imagevolume.Native
	for _, v := range imageVolumes(annotations) {
		if imageID.MatchString(v.Image.Image) {
			found = append(found, imagevolume.Native{MountPath: v.ContainerPath, HostPath: v.HostPath, ImageID: v.Image.Image})
		}
	}
	return found
}

// report is one element of the list in ReportAnnotation: with one image, or with
// several.
type report struct {
	MountPath string `json:"mountPath"`
	imagevolume.VolumeImage
	Images []imagevolume.VolumeImage `json:"images,omitempty"`
}

// nativeReport says for the log which image is at which path.
func nativeReport(natives []imagevolume.Native) string {
	said := make([]string, len(natives))
	for i, v := range natives {
		said[i] = v.MountPath + "=" + v.ImageID
	}
	return strings.Join(said, " ")
}

// adjust turns the volumes given into bind mounts and the report, and has native
// take the place of mounts. A report that stands on a container without volumes is
// not ours, and goes.
func adjust(given []imagevolume.Given, native []*api.Mount, annotations map[string]string) (*api.ContainerAdjustment, error) {
	adjustment := &api.ContainerAdjustment{Mounts: native}
	if len(given) == 0 {
		if _, ok := annotations[ReportAnnotation]; ok {
			adjustment.RemoveAnnotation(ReportAnnotation)
		}
		return adjustment, nil
	}
	reports := make([]report, len(given))
	for i, g := range given {
		adjustment.AddMount(&api.Mount{
			Type: "bind", Source: g.Mount.Source, Destination: g.Mount.Destination, Options: g.Mount.Options,
		})
		one, several := g.Shown()
		reports[i] = report{MountPath: g.MountPath, VolumeImage: one, Images: several}
	}
	text, err := json.Marshal(reports)
	if err != nil {
		return nil, fmt.Errorf("write annotation %s: %w", ReportAnnotation, err)
	}
	// Without a removal beside it: NRI may carry that out last.
	adjustment.AddAnnotation(ReportAnnotation, string(text))
	return adjustment, nil
}
