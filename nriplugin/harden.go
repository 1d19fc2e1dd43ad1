package nriplugin

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// hardened returns the mounts that CRI-O has made of the container's native image
// volumes once more, with what CRI-O leaves out: nosuid, nodev and, unless the pod
// has programs run, noexec. NRI puts a mount in the place of that with its
// destination. unknown are the paths of volumes whose mount is of a form that is
// not CRI-O's.
//
// A container in a user namespace is left alone: NRI does not carry the mappings of
// a mount, which would be lost. CRI-O does not run such a container anyway.
func hardened(pod *api.PodSandbox, c *api.Container) (mounts []*api.Mount, unknown []string, err error) {
	volumes := imageVolumes(c.GetAnnotations())
	if len(volumes) == 0 || slices.ContainsFunc(c.GetLinux().GetNamespaces(), isUserNamespace) {
		return nil, nil, nil
	}
	of := request.Pod{Namespace: pod.GetNamespace(), Name: pod.GetName()}
	name := request.ContainerName(c.GetAnnotations())
	exec, err := request.NativeExec(of, pod.GetAnnotations(), name)
	if err != nil {
		return nil, nil, err
	}
	options := []string{"ro", "nosuid", "nodev"}
	if !exec {
		options = append(options, "noexec")
	}
	for _, v := range volumes {
		i := slices.IndexFunc(c.GetMounts(), v.is)
		if i < 0 {
			unknown = append(unknown, v.ContainerPath)
			continue
		}
		m := c.GetMounts()[i]
		if slices.ContainsFunc(c.GetMounts()[i+1:], func(n *api.Mount) bool { return n.GetDestination() == m.GetDestination() }) {
			return nil, nil, fmt.Errorf("native image volume %s of container %s of pod %s: CRI-O mounts two things at %s: "+
				"have the artifact's files have titles of their own, or set harden_native = false in [volumes]",
				v.ContainerPath, name, of, m.GetDestination())
		}
		mounts = append(mounts, &api.Mount{
			Type: m.GetType(), Source: m.GetSource(), Destination: m.GetDestination(),
			Options: slices.Concat(m.GetOptions(), options), // the last of contrary ones counts
		})
	}
	return mounts, unknown, nil
}

func isUserNamespace(n *api.LinuxNamespace) bool { return n.GetType() == "user" }

// is reports whether CRI-O has made the mount for the volume. An image is the upper
// of two lower directories of an overlay; an artifact's file is bound into the
// volume's directory.
func (v crioVolume) is(m *api.Mount) bool {
	at, in := path.Clean(m.GetDestination()), path.Clean(v.ContainerPath)
	switch m.GetType() {
	case "overlay":
		return at == in && slices.ContainsFunc(m.GetOptions(), func(option string) bool {
			return strings.HasPrefix(option, "lowerdir="+v.HostPath+":")
		})
	case "bind":
		return m.GetSource() == v.HostPath && strings.HasPrefix(at, strings.TrimSuffix(in, "/")+"/")
	default:
		return false
	}
}
