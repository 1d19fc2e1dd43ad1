package realnode

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// PodSpec describes a pod to run.
type PodSpec struct {
	// Name and Namespace default to a fresh name and "default".
	Name, Namespace string
	Annotations     map[string]string
	// Handler is the runtime handler; "" is CRI-O's default.
	Handler string
	// OneSandbox gives the containers one process namespace, for which CRI-O makes
	// an infra container. Runtimes that put a pod into one sandbox need it.
	OneSandbox bool
	// Users gives the pod a user namespace with this mapping of user and group
	// ids, and a network namespace with nothing but a loopback.
	Users *cri.IDMapping
}

// Pod is a running pod sandbox.
type Pod struct {
	// ID is CRI-O's id of the sandbox.
	ID     string
	Config *cri.PodSandboxConfig

	node *Node
}

var podCount atomic.Uint64

// RunPod runs a pod sandbox with the host's network and its own processes.
func (n *Node) RunPod(ctx context.Context, spec PodSpec) (*Pod, error) {
	if spec.Name == "" {
		spec.Name = fmt.Sprintf("pod-%d-%d", time.Now().UnixNano(), podCount.Add(1))
	}
	if spec.Namespace == "" {
		spec.Namespace = "default"
	}
	uid := spec.Namespace + "-" + spec.Name
	config := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: spec.Name, Namespace: spec.Namespace, Uid: uid},
		Annotations:  spec.Annotations,
		LogDirectory: n.paths.in("log", "pods", uid),
		Labels: map[string]string{
			"io.kubernetes.pod.name":      spec.Name,
			"io.kubernetes.pod.namespace": spec.Namespace,
			"io.kubernetes.pod.uid":       uid,
		},
		Linux: &cri.LinuxPodSandboxConfig{
			CgroupParent: filepath.Join(n.paths.cgroupParent(), "pods", uid),
			SecurityContext: &cri.LinuxSandboxSecurityContext{
				NamespaceOptions: spec.namespaces(),
			},
		},
	}
	resp, err := n.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: spec.Handler})
	if err != nil {
		return nil, fmt.Errorf("run pod %s/%s: %w", spec.Namespace, spec.Name, err)
	}
	return &Pod{ID: resp.GetPodSandboxId(), Config: config, node: n}, nil
}

func (s PodSpec) namespaces() *cri.NamespaceOption {
	options := &cri.NamespaceOption{Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_CONTAINER}
	if s.OneSandbox {
		options.Pid = cri.NamespaceMode_POD
	}
	if s.Users != nil {
		options.Network = cri.NamespaceMode_POD
		ids := []*cri.IDMapping{s.Users}
		options.UsernsOptions = &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids}
	}
	return options
}

// ContainerSpec describes a container to create.
type ContainerSpec struct {
	// Name defaults to "main".
	Name string
	// Image defaults to the node's base image.
	Image string
	// UserImage is what the pod calls Image, where kubelet gives its id; it
	// defaults to Image.
	UserImage string
	// Command defaults to one that sleeps.
	Command     []string
	Annotations map[string]string
	Mounts      []*cri.Mount
	// Attempt is kubelet's count of restarts; it makes the name of a second
	// container of this name unique.
	Attempt uint32
	// Privileged gives the container everything.
	Privileged bool
	// User is the id to run as, as kubelet sets it; nil leaves it to the image.
	User *cri.Int64Value
}

// Container is a created container.
type Container struct {
	// ID is CRI-O's id of the container.
	ID string

	pod *Pod
}

// Pod returns a handle by which the sandbox of that id, whoever made it, can be
// removed.
func (n *Node) Pod(id string) *Pod { return &Pod{ID: id, node: n} }

// Create creates a container without starting it.
func (p *Pod) Create(ctx context.Context, spec ContainerSpec) (*Container, error) {
	if spec.Name == "" {
		spec.Name = "main"
	}
	if spec.Image == "" {
		spec.Image = p.node.BaseImage()
	}
	if spec.UserImage == "" {
		spec.UserImage = spec.Image
	}
	if spec.Command == nil {
		spec.Command = []string{"/bin/sleep", "1000000"}
	}
	meta := p.Config.GetMetadata()
	config := &cri.ContainerConfig{
		Metadata:    &cri.ContainerMetadata{Name: spec.Name, Attempt: spec.Attempt},
		Image:       &cri.ImageSpec{Image: spec.Image, UserSpecifiedImage: spec.UserImage},
		Command:     spec.Command,
		Annotations: spec.Annotations,
		Mounts:      spec.Mounts,
		LogPath:     fmt.Sprintf("%s-%d.log", spec.Name, spec.Attempt),
		Labels: map[string]string{
			"io.kubernetes.container.name": spec.Name,
			"io.kubernetes.pod.name":       meta.GetName(),
			"io.kubernetes.pod.namespace":  meta.GetNamespace(),
			"io.kubernetes.pod.uid":        meta.GetUid(),
		},
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions(),
			Privileged:       spec.Privileged,
			RunAsUser:        spec.User,
		}},
	}
	resp, err := p.node.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: p.ID, Config: config, SandboxConfig: p.Config,
	})
	if err != nil {
		return nil, fmt.Errorf("create container %s of pod %s/%s: %w", spec.Name, meta.GetNamespace(), meta.GetName(), err)
	}
	return &Container{ID: resp.GetContainerId(), pod: p}, nil
}

// Run creates and starts a container.
func (p *Pod) Run(ctx context.Context, spec ContainerSpec) (*Container, error) {
	c, err := p.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	return c, c.Start(ctx)
}

// Remove stops the pod's containers without grace and removes the pod. A pod
// that is gone already is no error.
func (p *Pod) Remove(ctx context.Context) error {
	rt := p.node.Runtime()
	list, err := rt.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.ID}})
	if err != nil {
		return fmt.Errorf("list containers of pod %s: %w", p.ID, err)
	}
	for _, c := range list.GetContainers() {
		if err := (&Container{ID: c.GetId(), pod: p}).Remove(ctx); err != nil {
			return err
		}
	}
	if _, err := rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		return fmt.Errorf("stop pod %s: %w", p.ID, err)
	}
	if _, err := rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		return fmt.Errorf("remove pod %s: %w", p.ID, err)
	}
	return nil
}

// Start starts the container.
func (c *Container) Start(ctx context.Context) error {
	if _, err := c.pod.node.Runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ID}); err != nil {
		return fmt.Errorf("start container %s: %w", c.ID, err)
	}
	return nil
}

// Output is what a command in a container gave.
type Output struct {
	Stdout, Stderr string
	ExitCode       int
}

// Exec runs a command in the container. An exit code other than 0 is no error.
func (c *Container) Exec(ctx context.Context, command ...string) (Output, error) {
	resp, err := c.pod.node.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: command, Timeout: 60})
	if err != nil {
		return Output{}, fmt.Errorf("exec %q in container %s: %w", command, c.ID, err)
	}
	return Output{string(resp.GetStdout()), string(resp.GetStderr()), int(resp.GetExitCode())}, nil
}

// Stop kills the container.
func (c *Container) Stop(ctx context.Context) error {
	if _, err := c.pod.node.Runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: c.ID, Timeout: 0}); err != nil {
		return fmt.Errorf("stop container %s: %w", c.ID, err)
	}
	return nil
}

// Remove kills and removes the container.
func (c *Container) Remove(ctx context.Context) error {
	if err := c.Stop(ctx); err != nil {
		return err
	}
	if _, err := c.pod.node.Runtime().RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: c.ID}); err != nil {
		return fmt.Errorf("remove container %s: %w", c.ID, err)
	}
	return nil
}

// Status is the container's status.
func (c *Container) Status(ctx context.Context) (*cri.ContainerStatus, error) {
	resp, err := c.pod.node.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.ID})
	if err != nil {
		return nil, fmt.Errorf("status of container %s: %w", c.ID, err)
	}
	return resp.GetStatus(), nil
}

// Info is CRI-O's verbose view of a container.
type Info struct {
	// PID is the container's first process; 0 if it does not run.
	PID int `json:"pid"`
	// Annotations are those of the OCI spec that the runtime was given.
	RuntimeSpec struct {
		Annotations map[string]string `json:"annotations"`
		Mounts      []struct {
			Destination string   `json:"destination"`
			Type        string   `json:"type"`
			Source      string   `json:"source"`
			Options     []string `json:"options"`
		} `json:"mounts"`
	} `json:"runtimeSpec"`
}

// Info asks for the container's process and OCI spec.
func (c *Container) Info(ctx context.Context) (Info, error) {
	var info Info
	resp, err := c.pod.node.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.ID, Verbose: true})
	if err != nil {
		return info, fmt.Errorf("status of container %s: %w", c.ID, err)
	}
	if err := json.Unmarshal([]byte(resp.GetInfo()["info"]), &info); err != nil {
		return info, fmt.Errorf("read the status of container %s: %w", c.ID, err)
	}
	return info, nil
}
